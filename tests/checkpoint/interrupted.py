"""Saves of every kind, ended or failed at a chosen operation on the file system.

`python tests/checkpoint/interrupted.py FOLDER WAY,HOW …` tries every operation in turn: WAY is `plain`, `background`
or `shared`, HOW is `killed`, `torn` (killed with half of the bytes written) or `full` (the disk is).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.shards import TensorShard
from paceline.checkpoint.store import Store
from paceline.checkpoint.writer import Saver
from paceline.core.errors import CheckpointError

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "symlink")
MOST = 1000
NOTE = "a note of mine"


def content(value: int, rank: int = 0, world: int = 1) -> tuple[Any, Any]:
    whole = torch.full((4, 300), float(value))
    if world == 1:
        return {"weight": whole}, {"value": value, "momentum": whole * 2}
    part = TensorShard(whole[rank * 2 : rank * 2 + 2], (4, 300), rank * 2)
    return {"weight": part}, {"value": value, "momentum": TensorShard(part.tensor * 2, (4, 300), part.start)}


def save(root: Path, way: str, step: int, value: int, top1: float) -> bool:
    """Whether it was saved; one that ends the process does not say."""
    world = 2 if way == "shared" else 1
    stores = [Store(root, keep_last=1, best="top1", timeout=0.1) for _ in range(world)]
    try:
        if way == "plain":
            stores[0].save(step, *content(value), {"top1": top1})
            return True
        savers = [Saver(store, rank, world, f"{value}") for rank, store in enumerate(stores)]
        ended = []
        for rank, saver in reversed(list(enumerate(savers))):  # one after the other, so that operations have an order
            saver.start(step, *content(value, rank, world), {})
            ended += saver.finish()
        savers[0].record_metrics(step, {"top1": top1})  # as a run does, behind an evaluation
        return all(outcome.error is None for outcome in ended)
    except CheckpointError:
        return False


def interrupt_at(number: int, how: str) -> None:
    """Kill this process after its operation of this number, or let that and all later ones that need space fail."""
    done, lock = 0, Lock()

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*arguments, **options)  # what is only read is on the disk already
            with lock:
                done += 1
                is_now, is_over = done == number, done >= number
            if how == "full" and is_over and name in ("write", "mkdir", "symlink", "fsync", "open"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if how == "torn" and is_now and name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*arguments, **options)
            finally:
                if how != "full" and is_now:
                    os.kill(os.getpid(), signal.SIGKILL)

        return operation

    for name in OPERATIONS:
        setattr(os, name, wrapped(name, getattr(os, name)))


def in_child(work: Callable[[], bool]) -> bool:
    """Whether the work was done, in a process of its own."""
    child = os.fork()
    if child == 0:
        os._exit(0 if work() else 5)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 5, -signal.SIGKILL), code
    return code == 0


def check_after(run: Path, way: str, is_saved: bool) -> int:
    """What the newest checkpoint holds; it must be a whole one, and the next save must succeed and leave no traces."""
    root = run / "checkpoints"
    store = Store(root, keep_last=1, best="top1")
    found = store.newest()
    assert found is not None
    assert not store.rejected, store.rejected
    value: int = found.state["value"]
    assert found.model["weight"].equal(torch.full((4, 300), float(value)))
    assert found.state["momentum"].equal(torch.full((4, 300), value * 2.0))
    assert value == 33 or not is_saved
    assert open_checkpoint(run / "best").state["value"] == 11
    assert save(root, way, 5, 55, 0.3)
    assert open_checkpoint(root).state["value"] == 55
    assert sorted(path.name for path in root.iterdir()) == ["index.json", "notes.txt", "step-00000001", "step-00000005"]
    assert (root / "notes.txt").read_text() == NOTE
    return value


def main(folder: Path, way: str, how: str) -> int:
    """The number of operations that a save takes, after each of them was the last."""
    torch.set_num_threads(1)
    template = folder / "template"
    for step, value, top1 in ((1, 11, 0.9), (2, 22, 0.1), (3, 23, 0.2)):
        assert save(template / "checkpoints", way, step, value, top1)
    (template / "checkpoints" / "notes.txt").write_text(NOTE)
    real_fsync = os.fsync
    values = []
    for number in range(1, MOST):
        run = folder / f"{number}"
        shutil.copytree(template, run, symlinks=True)

        def work(number: int = number, run: Path = run) -> bool:
            os.fsync = lambda fd: None  # a kill, unlike a power cut, loses nothing that was written
            interrupt_at(number, how)
            return save(run / "checkpoints", way, 4, 33, 0.7)

        is_saved = in_child(work)
        os.fsync = lambda fd: None
        values.append(check_after(run, way, is_saved))
        os.fsync = real_fsync
        shutil.rmtree(run)
        if is_saved:
            break
    assert values == sorted(values)
    assert (values[0], values[-1]) == (23, 33), values
    return len(values)


if __name__ == "__main__":
    for words in sys.argv[2:]:
        print(words, main(Path(sys.argv[1], words), *words.split(",")))
