"""Several processes write one checkpoint: it is committed when all of them have, and reads alike whoever wrote it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import unnoticed
from support.waiting import TIMEOUT
from torch import Tensor

from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.shards import SaveRank, TensorShard
from paceline.checkpoint.store import Store
from paceline.core.errors import CheckpointError

FORK = multiprocessing.get_context("fork")
SHAPES = {"stem.weight": (7, 3), "head.weight": (2, 5, 2), "head.bias": (1,)}


def whole(seed: int, kind: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(kind) for name, shape in SHAPES.items()}


def part_of(tensor: Tensor, rank: int, world: int) -> TensorShard:
    """As torch cuts: rows rounded up for the first ones, possibly none for the last."""
    rows = -(-len(tensor) // world)
    start = min(rank * rows, len(tensor))
    return TensorShard(tensor[start : start + rows], tuple(tensor.shape), start)


def content(step: int, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model: dict[str, Any] = {name: part_of(tensor, rank, world) for name, tensor in whole(step).items()}
    model["norm.mean"] = torch.full((3,), float(step))
    moments = {name: part_of(tensor, rank, world) for name, tensor in whole(step + 50, torch.bfloat16).items()}
    return model, {"step": step, "rate": 0.1, "moments": moments, "count": torch.tensor(step), "list": [1, None]}


def save(root: Path, step: int, rank: int, world: int, attempt: str = "a", timeout: float = TIMEOUT) -> None:
    torch.set_num_threads(1)
    store = Store(root, keep_last=2, best="top1", timeout=timeout)
    store.save(step, *content(step, rank, world), {"top1": 0.5}, SaveRank(rank, world, attempt))


def save_together(root: Path, step: int, world: int) -> list[int | None]:
    """The exit codes of the processes."""
    processes = [FORK.Process(target=save, args=(root, step, rank, world)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    return [process.exitcode for process in processes]


def save_alone(root: Path, step: int, rank: int, world: int, target: Callable[..., None]) -> int | None:
    """The exit code of one of the processes, once it has ended."""
    process = FORK.Process(target=target, args=(root, step, rank, world))
    process.start()
    process.join(TIMEOUT)
    return process.exitcode


def assert_is_of_step(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.step == step
    expected = {**whole(step), "norm.mean": torch.full((3,), float(step))}
    assert checkpoint.model.keys() == expected.keys()
    assert all(checkpoint.model[name].equal(tensor) for name, tensor in expected.items())
    moments = whole(step + 50, torch.bfloat16)
    assert checkpoint.state["moments"].keys() == moments.keys()
    for name, tensor in moments.items():
        found = checkpoint.state["moments"][name]
        assert found.dtype == torch.bfloat16
        assert found.equal(tensor)
    rest = {key: value for key, value in checkpoint.state.items() if key != "moments"}
    assert rest == {"step": step, "rate": 0.1, "count": torch.tensor(step), "list": [1, None]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_processes_writes_what_reads_alike(root: Path, world: int) -> None:
    assert save_together(root, 5, world) == [0] * world
    assert_is_of_step(Store(root).newest(), 5)
    assert_is_of_step(open_checkpoint(root.parent / "best"), 5)
    assert sorted(path.name for path in root.iterdir()) == ["index.json", "step-00000005"]


def test_the_manifest_lists_what_sha256sum_tells_of_all_parts(root: Path) -> None:
    save_together(root, 5, 2)
    folder = root / "step-00000005"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    ours = ["00001-of-00002", "00002-of-00002"]
    names = [f"model-{of}.safetensors" for of in ours] + [f"part-{of}.json" for of in ours] + ["state.json"]
    names += [f"state-{of}.safetensors" for of in ours]
    assert sorted(files) == sorted(names)
    lines = subprocess.run(["sha256sum", *files], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in lines.splitlines()] == [entry["sha256"] for entry in files.values()]


def test_every_damage_to_parts_is_noticed(root: Path) -> None:
    save_together(root, 5, 2)
    assert unnoticed(root / "step-00000005", 300, seed=1) == []
    assert_is_of_step(open_checkpoint(root), 5)


def die_before_the_end(root: Path, step: int, rank: int, world: int) -> None:
    if rank == 1:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
    save(root, step, rank, world, timeout=0.5)


def test_without_one_of_them_nothing_is_committed(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_together(root, 5, 2)
    # One after the other: what a late one still writes would lie there when the first has given up and tidied.
    assert [save_alone(root, 6, rank, 2, die_before_the_end) for rank in (1, 0)] == [-signal.SIGKILL, 1]
    assert re.search(r"rank 1 of 2 .* 0\.5 s", capfd.readouterr().err)
    assert_is_of_step(Store(root).newest(), 5)
    assert sorted(path.name for path in root.iterdir()) == ["index.json", "step-00000005"]
    assert save_together(root, 7, 3) == [0, 0, 0]
    assert_is_of_step(Store(root).newest(), 7)


def test_parts_that_a_killed_save_left_are_not_taken_for_new_ones(root: Path) -> None:
    root.mkdir(parents=True)
    stale = content(9, 1, 2)
    Store(root).save(6, *stale, {}, SaveRank(1, 2, "earlier"))
    Store(root).save(6, *content(9, 2, 3), {}, SaveRank(2, 3, "earlier"))
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 .* 0\.1 s"):
        save(root, 6, 0, 2, "later", timeout=0.1)
    Store(root).save(6, *stale, {}, SaveRank(1, 2, "earlier"))
    Store(root).save(6, *content(9, 2, 3), {}, SaveRank(2, 3, "earlier"))
    save(root, 6, 1, 2, "later")
    save(root, 6, 0, 2, "later")
    assert_is_of_step(Store(root).newest(), 6)
    assert not list((root / "step-00000006").glob("*-of-00003*"))


def test_the_failure_of_one_is_reported_by_the_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"bytes are needed.*No space left"):
        save(root, 6, 1, 2)
    monkeypatch.undo()
    assert [path.name for path in (root / ".step-00000006.partial").iterdir()] == ["part-00002-of-00002.json"]
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 .*No space left on device"):
        save(root, 6, 0, 2)
    assert [path.name for path in root.iterdir()] == ["index.json"]


def test_parts_already_being_written_for_a_later_save_stay(root: Path) -> None:
    Store(root).save(8, *content(8, 1, 2), {}, SaveRank(1, 2, "a"))
    Store(root).save(6, *content(6, 1, 2), {}, SaveRank(1, 2, "a"))
    save(root, 6, 0, 2)
    save(root, 8, 0, 2)
    assert_is_of_step(Store(root).newest(), 8)


def test_parts_that_do_not_belong_anywhere_are_refused(root: Path) -> None:
    rows = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(4, 4\)"):
        TensorShard(rows, (4, 4), 0)
    with pytest.raises(ValueError, match="rows 3 to 5"):
        TensorShard(rows, (4, 3), 3)
    with pytest.raises(ValueError, match="w: "):
        Store(root).save(1, {"w": TensorShard(rows, (4, 3), 0)}, {}, {})
    with pytest.raises(ValueError, match="rank 2"):
        SaveRank(2, 2)


@pytest.mark.parametrize(("start", "words"), [(1, "expected row 2, got 1"), (3, "expected row 2, got 3")])
def test_parts_that_overlap_or_leave_a_gap_are_noticed(root: Path, start: int, words: str) -> None:
    Store(root).save(1, {"w": TensorShard(torch.zeros(2, 3), (5, 3), start)}, {}, {}, SaveRank(1, 2))
    Store(root).save(1, {"w": TensorShard(torch.zeros(2, 3), (5, 3), 0)}, {}, {}, SaveRank(0, 2))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(root)
