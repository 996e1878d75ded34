"""`paceline report` as a user runs it."""

from __future__ import annotations

import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from sample_runs import write_run

from paceline.cli import main
from paceline.core.place import HERE
from paceline.report.server import ReportServer


def test_one_run_and_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "first")
    write_run(tmp_path / "runs" / "second", optimizer={"lr": 0.1})
    assert main(["report", "runs/first"]) == 0
    assert "runs/first/report.html" in capsys.readouterr().out
    assert (tmp_path / "runs/first/report.html").is_file()
    assert main(["report", "runs"]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('"main":') == 2
    assert main(["report", "runs/second", "--out", "pages/second.html"]) == 0
    assert (tmp_path / "pages/second.html").is_file()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing"], "nothing"),
        (["."], "run directory"),
        (["run", "--out", "report.pdf"], ".html"),
        (["run", "--port", "80"], "--serve"),
        (["run", "--serve", "--port", "70000"], "70000"),
        (["run", "--serve", "--out", "x.html"], "--out"),
        (["run", "--out", "run/recipe.yaml/report.html"], "report.html"),
    ],
)
def test_mistakes_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    write_run(tmp_path / "elsewhere" / "run")
    (tmp_path / "elsewhere" / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" / ("empty" if words == ["."] else ""))
    assert main(["report", *words]) == 2
    assert expected in capsys.readouterr().err


def test_damaged_metrics_are_a_data_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"{}\n")
    assert main(["report", str(folder)]) == 3
    assert re.search(r"metrics\.jsonl:\d+", capsys.readouterr().err)
    assert not (folder / "report.html").exists()


def test_a_run_without_metrics_has_a_page_and_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", num_steps=0, ends=False)
    assert main(["report", str(folder)]) == 0
    assert f"{folder} has logged nothing yet" in capsys.readouterr().err
    assert (folder / "report.html").is_file()


def ask(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_server_answers_this_machine_only_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ends=False)
    command = [sys.executable, "-m", "paceline", "report", str(folder), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(rf"http://{re.escape(HERE)}:\d+/", process.stdout.readline())
            assert found
            address = found[0]
            status, page = ask(address)
            assert status == 200
            assert "connect-src 'self'" in page
            (state,) = re.findall(r'"state":"([0-9a-f]{16})"', page)
            assert ask(f"{address}version") == (200, state)
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(b'{"step": 41, "epoch": 4.1, "split": "train", "loss": 0.123456}\n')
            assert ask(f"{address}version")[1] != state
            assert "0.123456" in ask(address)[1]
            assert ask(f"{address}recipe.yaml")[0] == 404
            assert ask(address, Host="evil.example:80")[0] == 404
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(b"damaged\n")
            assert ask(address)[0] == 500
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),  # browsers leave port 80 out
        ("localhost", 200),
        ("LocalHost:8080", 200),
        ("[::1]", 200),
        ("[::1]:8080", 200),  # behind a tunnel
        ("127.0.0.2:1", 200),
        ("", 404),
        ("evil.example", 404),
        ("evil.example@127.0.0.1", 404),
        ("localhost.evil.example:80", 404),
        ("127.0.0.1.evil.example", 404),
        ("localhost:80@evil.example", 404),
        ("192.168.0.1", 404),
        ("[::1", 404),
        ("[fe80::1]:80", 404),
    ],
)
def test_it_answers_to_names_of_this_machine_only(tmp_path: Path, host: str, status: int) -> None:
    server = ReportServer([write_run(tmp_path / "run", num_steps=2)], 0)
    with server, socket.create_connection((HERE, server.server_port)) as browser:
        browser.sendall(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        server.handle_request()
        with browser.makefile("rb") as answer:
            assert answer.read().startswith(f"HTTP/1.0 {status} ".encode())


def test_a_port_that_is_taken_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    with ReportServer([folder], 0) as server:
        assert main(["report", str(folder), "--serve", "--port", str(server.server_port)]) == 2
    assert str(server.server_port) in capsys.readouterr().err


def test_a_browser_that_leaves_before_it_has_the_page_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ReportServer([write_run(tmp_path / "run")], 0) as server:
        monkeypatch.setattr(server, "page", lambda: bytes(1 << 26))  # more than a connection holds
        with socket.create_connection((HERE, server.server_port)) as browser:
            browser.sendall(f"GET / HTTP/1.0\r\nHost: {HERE}:1\r\n\r\n".encode())
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            server.handle_request()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and "process_request_thread" in thread.name:
                thread.join()
    assert capsys.readouterr().err == ""
