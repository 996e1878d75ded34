"""Requests to stop as systems make them: repeated, in the middle of an evaluation, by a terminal that is closed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from shared_launch import environment
from support.forkserver import Running
from support.waiting import TIMEOUT, wait_until

RECIPE = {
    "name": "asked",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4]},
    "data": {
        "batch_size": 20,
        "train": {"dataset": "waiting", "split": "train", "name": "train"},
        "val": {"dataset": "waiting", "split": "test", "name": "val"},
        "test": {"dataset": "waiting", "split": "test", "name": "test"},
    },
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.1},
    # Bit-identical on two processes and on one.
    "train": {"steps": 4, "micro_batch_size": 10, "reproducible": "world", "averaging": {"name": "ema", "decay": 0.5}},
    "evaluate": {"every_steps": 4, "batch_size": 10, "metrics": ["moody"]},
    "checkpoint": {"every_steps": 100},
    "logging": {"every_steps": 4, "images": False, "tensorboard": False},
}


class Command:
    """`paceline train` in a folder; `streams` are given to a process that Python is started in."""

    def __init__(self, folder: Path, *words: str, wait_in: str = "", fail_rank: str = "", **streams: Any) -> None:
        self.folder, self.out = folder, folder / "runs" / "asked"
        (folder / "recipe.json").write_text(json.dumps(RECIPE))
        (folder / "go").unlink(missing_ok=True)
        command = ["paceline", "train", "recipe.json", "--use", "slow_splits", *words]
        variables = environment(WAIT_IN=wait_in, FAIL_RANK=fail_rank)
        self.process: Running | subprocess.Popen[bytes]
        if streams:
            python = [sys.executable, "-m", *command]
            self.process = subprocess.Popen(python, cwd=folder, env=variables, start_new_session=True, **streams)
        else:
            self.process = Running(folder, command, variables, session=True)

    def wait_for(self, path: str) -> None:
        wait_until(lambda: (self.folder / path).exists() or self.process.poll() is not None, f"there is {path}")
        assert (self.folder / path).exists(), self.printed()

    def printed(self) -> str:
        return "".join(self.process.printed()) if isinstance(self.process, Running) else ""

    def end(self, code: int) -> None:
        (self.folder / "go").touch()
        process = self.process
        found = process.end().returncode if isinstance(process, Running) else process.wait(TIMEOUT)
        assert found == code, self.printed()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.out / "status.json").read_text())
        return status

    def records(self) -> list[dict[str, Any]]:
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name != "clock"} for line in lines]

    @contextmanager
    def asked_again_and_again(self) -> Iterator[None]:
        """Send SIGTERM to all of its processes every few milliseconds, until it has ended."""
        ended = threading.Event()

        def request_stop() -> None:
            while not ended.wait(0.003):
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGTERM)

        requests = threading.Thread(target=request_stop)
        requests.start()
        time.sleep(1.0)  # until a launcher has looked for requests, and passed them on
        try:
            yield
        finally:
            ended.set()
            requests.join()


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run records that nothing happens to."""
    command = Command(tmp_path_factory.mktemp("whole"))
    command.end(0)
    found = command.records()
    assert [(record["split"], record["step"]) for record in found] == [("val", 4), ("train", 4), ("test", 4)]
    return found


@pytest.mark.parametrize(("split", "procs"), [("train", "1"), ("test", "1"), ("val", "2")])
def test_repeated_requests_stop_a_run_wherever_it_is(
    split: str, procs: str, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    command = Command(tmp_path, "--procs", procs, wait_in=split)
    command.wait_for(split)
    with command.asked_again_and_again():
        command.end(75)
    assert command.status()["state"] == "stopped"
    step = command.status()["step"]
    assert step >= 1 if split == "train" else step == 4  # a busy machine may deliver the request a step later
    assert [path.name for path in (command.out / "checkpoints").glob("step-*")] == [f"step-{step:08d}"]
    again = Command(tmp_path)
    again.end(0)
    assert again.records() == records
    assert again.status()["state"] == "finished"


@pytest.mark.parametrize(("number", "procs"), [(signal.SIGUSR2, "1"), (signal.SIGXCPU, "2")])
def test_what_else_a_scheduler_sends_saves_and_stops(number: signal.Signals, procs: str, tmp_path: Path) -> None:
    """Those that end a process by default; `test_loop` and `test_local` have the others."""
    command = Command(tmp_path, "--procs", procs, wait_in="train")
    command.wait_for("train")
    os.killpg(command.process.pid, number)
    if procs == "2":
        time.sleep(0.5)  # until the launcher has passed it on
    command.end(75)
    assert command.status()["state"] == "stopped"
    assert (command.out / "checkpoints" / f"step-{command.status()['step']:08d}").is_dir()


def test_a_metric_that_raises_in_one_process_costs_no_training(records: list[dict[str, Any]], tmp_path: Path) -> None:
    command = Command(tmp_path, "--procs", "2", "--restarts", "0", fail_rank="1")
    command.end(1)
    assert "ZeroDivisionError: not today" in command.printed()
    assert (command.status()["state"], command.status()["step"]) == ("failed", 4)
    assert (command.out / "checkpoints" / "step-00000004").is_dir()
    again = Command(tmp_path)
    again.end(0)
    assert again.records() == records


def test_a_request_before_training_begins_is_answered_alike(tmp_path: Path) -> None:
    command = Command(tmp_path, stdout=subprocess.DEVNULL)
    command.wait_for("runs/asked/.lock")
    command.process.send_signal(signal.SIGTERM)
    command.end(75)
    assert command.process.poll() == 75


@pytest.mark.parametrize("procs", [1, 2])
def test_a_closed_terminal_is_a_request_to_stop(procs: int, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = Command(
        tmp_path,
        *("train.steps=100000", "evaluate.every_steps=100000", "logging.every_steps=1", "--procs", str(procs)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),  # the terminal of its session, as under ssh
    )
    os.close(theirs)
    while not (command.out / "metrics.jsonl").exists() and command.process.poll() is None:
        if select.select([ours], [], [], 0.05)[0]:
            os.read(ours, 1 << 16)
    os.close(ours)
    command.end(75)
    assert command.status()["state"] == "stopped"
    assert (command.out / "checkpoints" / f"step-{command.status()['step']:08d}").is_dir()


def test_a_run_needs_no_standard_streams(tmp_path: Path) -> None:
    def close() -> None:
        for descriptor in range(3):
            os.close(descriptor)

    command = Command(tmp_path, preexec_fn=close)
    command.end(0)
    assert command.status()["state"] == "finished"
