"""Serves the report of runs to browsers on this machine, always as of now."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from paceline.core.errors import PacelineError, UsageError
from paceline.core.place import HERE
from paceline.report.page import Report


def serve(folders: Sequence[Path], port: int = 0) -> None:
    """Serve until interrupted; prints the address first. Port 0 takes a free one."""
    try:
        server = ReportServer(folders, port)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}; choose another, or leave --port away") from error
    with server:
        print(f"serving {server.address} until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped serving", flush=True)


class ReportServer(ThreadingHTTPServer):
    """A server on the loopback address: the page at /, and at /version a word that changes when there is news."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        self._report = Report(folders)
        self._lock = Lock()
        self._state, self._page = "", b""
        super().__init__((HERE, port), _Handler)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{HERE}:{self.server_port}/"

    def page(self) -> bytes:
        """The page as of now; made again only if something has changed."""
        with self._lock:
            state = self._report.state()
            if state != self._state:
                self._page, self._state = self._report.render(is_served=True), state
            return self._page

    def version(self) -> bytes:
        """The word that the page compares with its own."""
        return self._report.state().encode()


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """Answer a browser of this machine."""
        answers = {"/": (self.server.page, "text/html"), "/version": (self.server.version, "text/plain")}
        if not _is_here(self.headers.get("Host", "")) or self.path not in answers:
            self.send_error(404)
            return
        make, kind = answers[self.path]
        try:
            status, content = 200, make()
        except PacelineError as error:
            status, kind, content = 500, "text/plain", f"{error}\n".encode(errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        with suppress(ConnectionError):  # a browser that leaves a page does not wait for it
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - as the base class has it
        """Requests are not logged."""


def _is_here(host: str) -> bool:
    """Whether a Host header names this machine, with or without a port.

    A foreign page whose name leads here sends its own name, so no name but localhost is answered.
    """
    try:
        name = "" if "@" in host else urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
