"""Saving beside training: the state of the moment is saved, failures are reported, nothing is ever half done."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.full_disk import files_limited_to
from torch import Tensor, nn

from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.shards import TensorShard
from paceline.checkpoint.state import flatten, optimizer_tree
from paceline.checkpoint.store import Store
from paceline.checkpoint.writer import Saver


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def odd_tensors() -> dict[str, Tensor]:
    """Everything that a copy could get wrong."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(40, 30, generator=generator)
    return {
        "wide": wide,
        "turned": wide.t(),
        "column": wide[:, 3],
        "tied": wide,
        "repeated": wide[0].expand(4, 30),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "small": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "conjugated": torch.randn(3, dtype=torch.complex64, generator=generator).conj(),
        "large": torch.randn(700_000, generator=generator),
    }


def same_bits(left: Tensor, right: Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and bytes(
        left.contiguous().resolve_conj().reshape(-1).view(torch.uint8).tolist()
    ) == bytes(right.contiguous().resolve_conj().reshape(-1).view(torch.uint8).tolist())


@contextmanager
def held_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no write happen until the event is set."""
    real, may_write = os.write, threading.Event()

    def write(descriptor: int, data: Any) -> int:
        may_write.wait(30)
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        try:
            yield may_write
        finally:
            may_write.set()


def test_what_changes_after_the_copy_is_saved_as_it_was(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = odd_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    state: dict[str, Any] = {"inner": [tensors["wide"], {"rate": 0.1}], "note": "x"}
    saver = Saver(Store(root))
    with held_writer(monkeypatch) as may_write:
        saver.start(3, tensors, state, {"top1": 0.5})
        assert saver.poll() == []
        for name in ("wide", "scalar", "flags", "bytes", "half", "conjugated", "large"):
            tensors[name].zero_()
        state["inner"][1]["rate"] = 9.0
        state["note"] = "y"
        may_write.set()
        results = saver.finish()
    assert [(o.step, o.path, o.error) for o in results] == [(3, root / "step-00000003", None)]
    found = open_checkpoint(root)
    assert found.model.keys() == before.keys()
    assert [name for name in before if not same_bits(found.model[name], before[name])] == []
    assert same_bits(found.state["inner"][0], before["wide"])
    assert (found.state["inner"][1], found.state["note"]) == ({"rate": 0.1}, "x")
    assert found.metrics == {"top1": 0.5}


def test_the_files_are_those_of_the_store_itself(root: Path, tmp_path: Path) -> None:
    model, state = odd_tensors(), {"ema": odd_tensors(), "rates": [0.1, float("nan")]}
    direct = Store(tmp_path / "direct").save(7, model, state, {}).path
    saver = Saver(Store(root))
    saver.start(7, model, state, {})
    path = saver.finish()[0].path
    assert {f.name: f.read_bytes() for f in path.iterdir()} == {f.name: f.read_bytes() for f in direct.iterdir()}


def test_training_goes_on_while_each_state_is_saved(root: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 400), nn.BatchNorm1d(400), nn.Linear(400, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saver = Saver(Store(root, keep_last=100))
    expected, results = {}, []
    for step in range(12):
        samples = torch.randn(8, 30)
        model(samples).square().mean().backward()
        optimizer.step()
        tree = {"optimizer": optimizer_tree(optimizer, model)}
        expected[step] = ({k: v.clone() for k, v in model.state_dict().items()}, deepcopy(flatten(tree)[0]))
        saver.start(step, model.state_dict(), tree, {})
        results += saver.poll()
    results += saver.finish()
    assert [result.step for result in results] == list(range(12))
    assert saver.poll() == saver.finish() == []
    for result in results:
        found = open_checkpoint(result.path)
        weights, states = expected[result.step]
        assert all(found.model[name].equal(tensor) for name, tensor in weights.items())
        assert all(flatten(found.state)[0][name].equal(tensor) for name, tensor in states.items())


def test_a_second_save_waits_for_the_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(Store(root))
    model = {"weight": torch.ones(3)}
    with held_writer(monkeypatch) as may_write:
        saver.start(1, model, {}, {})
        threading.Timer(0.1, may_write.set).start()
        saver.start(2, model, {}, {})
        first, *rest = saver.poll()
    (second,) = rest + saver.finish()
    assert (first.step, second.step) == (1, 2)
    assert second.waited > 0


def test_the_writer_steps_back_and_others_do_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("threads have priorities of their own on Linux only")
    niceness = []
    real = os.write

    def write(descriptor: int, data: Any) -> int:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(descriptor, data)

    here = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(os, "write", write)
    saver = Saver(Store(root))
    saver.start(1, {"weight": torch.ones(3)}, {}, {})
    saver.finish()
    assert min(niceness) >= 10
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


def test_memory_is_reused_and_grows(root: Path) -> None:
    saver = Saver(Store(root))
    for size, is_same in ((1000, False), (10, True), (1000, True), (5000, False)):
        block = saver._buffer
        saver.start(size, {"weight": torch.full((size,), float(size))}, {}, {})
        assert saver.finish()[0].error is None
        assert (saver._buffer is block) == is_same
        assert open_checkpoint(root / f"step-{size:08d}").model["weight"].tolist() == [size] * size


def test_a_full_disk_is_an_outcome_and_the_next_save_succeeds(root: Path) -> None:
    saver = Saver(Store(root, keep_last=1))
    model = {"weight": torch.ones(2000)}
    saver.start(1, model, {}, {})
    saver.finish()
    for limit in (0, 100, 4096, 8000):
        with files_limited_to(limit):
            saver.start(2, model, {}, {})
            (result,) = saver.finish()
        assert result.path == root / "step-00000002"
        assert result.num_bytes > 8000
        assert result.error is not None
        assert "File too large" in result.error
        assert sorted(path.name for path in root.iterdir() if path.name != "index.json") == ["step-00000001"]
        assert open_checkpoint(root).step == 1
        assert saver.last_step == 2
    saver.start(3, model, {}, {})
    assert saver.finish()[0].error is None
    assert open_checkpoint(root).step == 3


def test_what_cannot_be_saved_is_refused_at_once_and_mistakes_of_ours_are_raised(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(Store(root))
    with pytest.raises(TypeError, match="when"):
        saver.start(1, {}, {"when": object()}, {})
    assert (saver.last_step, saver.finish()) == (None, [])
    monkeypatch.setattr(saver.store, "_rotate", lambda *_: 1 / 0)
    saver.start(2, {}, {}, {})
    with pytest.raises(ZeroDivisionError):
        saver.finish()
    assert saver.finish() == []


def test_savers_of_several_processes_commit_together(root: Path) -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    savers = [Saver(Store(root, timeout=20), rank, 2, "one start") for rank in (0, 1)]
    for step in (1, 2):
        for saver, rows in zip(savers, (slice(0, 3), slice(3, 5)), strict=True):
            part = TensorShard(whole[rows] + step, (5, 2), rows.start)
            saver.start(step, {"weight": part}, {"momentum": [part], "step": step}, {"top1": 0.1})
        results = [saver.finish() for saver in savers]
        assert [[o.error for o in own] for own in results] == [[None], [None]]
    found = open_checkpoint(root)
    assert found.model["weight"].equal(whole + 2)
    assert found.state["momentum"][0].equal(whole + 2)
    assert [saver.last_step for saver in savers] == [2, 2]


def test_who_does_not_save_takes_note_of_the_step(root: Path) -> None:
    saver = Saver(Store(root), writes=False)
    saver.start(4, {}, {}, {})
    assert (saver.last_step, saver.poll(), saver.finish(), root.exists()) == (4, [], [], False)


LEAVING = """
import sys
from pathlib import Path
import torch
from paceline.checkpoint.writer import Saver
from paceline.checkpoint.store import Store

rank, world = int(sys.argv[2]), int(sys.argv[3])
Saver(Store(Path(sys.argv[1]), timeout=60), rank, world).start(1, {"weight": torch.ones(3)}, {}, {})
raise SystemExit(3)
"""


@pytest.mark.parametrize(("world", "is_saved"), [(1, True), (2, False)])
def test_a_process_that_ends_finishes_its_save_but_waits_for_no_other(root: Path, world: int, is_saved: bool) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING, str(root), "0", str(world)], timeout=40, capture_output=True)
    assert done.returncode == 3, done.stderr
    assert (root / "step-00000001").exists() == is_saved
    assert not list(root.glob(".*"))
