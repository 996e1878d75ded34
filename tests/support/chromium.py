"""Headless Chromium, driven by its DevTools protocol over two pipes; needs no driver and no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0


def find_chromium() -> str:
    """The program; skips the test where there is none."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium: `make browser` installs it, as root on Debian or Ubuntu")


_NAVIGATED = "Inspected target navigated or closed"


class Page:
    """A tab: what it requested, what it complained of, and what a user does in it."""

    def __init__(self, out: int, into: int) -> None:
        self._out, self._into = out, into
        self._number, self._unread, self._session = 0, b"", ""
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """The result of a command; what happens meanwhile is recorded."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": arguments, **session}
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if method == "Runtime.evaluate" and _NAVIGATED in str(answer.get("error")):
                    return self.call(method, **arguments)  # another page came meanwhile
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, address: str) -> None:
        """Go to an address and wait until it is loaded."""
        before = self._loaded
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + PATIENCE
        while self._loaded == before:
            assert time.monotonic() < deadline
            self.evaluate("0")

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The first value of an expression that is true."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, script
        return value

    def place(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """A place in an element, given in parts of its size, after it was scrolled into view."""
        script = f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = found.getBoundingClientRect();
            return [box.left + {x} * box.width, box.top + {y} * box.height];
        }})()"""
        left, top = self.evaluate(script)
        return left, top

    def mouse(self, kind: str, place: tuple[float, float], **arguments: Any) -> None:
        """Move the mouse, or press or release its button."""
        self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **arguments)

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        place = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, place, button="left", clickCount=1)

    def screenshot(self, path: Path, is_whole: bool = False) -> None:
        """Save what is seen, or the whole page."""
        content = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)["data"]
        path.write_bytes(base64.b64decode(content))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = os.read(self._out, 1 << 20)
            assert piece, "Chromium has ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        event: dict[str, Any] = json.loads(message)
        self._note(event.get("method"), event.get("params", {}))
        return event

    def _note(self, method: str | None, values: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"]))
        elif method == "Log.entryAdded" or (method == "Runtime.consoleAPICalled" and values["type"] != "log"):
            self.problems.append(json.dumps(values))


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """A tab of a Chromium of its own, which ends behind it."""
    program = find_chromium()
    from_us, into = os.pipe()
    out, to_us = os.pipe()

    # Chromium reads commands from descriptor 3 and answers on descriptor 4.
    command = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", command, program, *FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"],
        pass_fds=(from_us, to_us),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(out, into)
    finally:
        os.close(into)  # it ends when nobody can command it any more
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(out)
