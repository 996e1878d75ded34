"""Several processes that open a run's checkpoint while it saves and removes them have the same one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import FORK, WORLD, in_processes
from support.waiting import TIMEOUT

from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.store import Store
from paceline.checkpoint.weights import find_weights
from paceline.core.agreement import check_same, decide, read_together
from paceline.core.errors import CheckpointError, DataError
from paceline.core.world import World

OPENINGS = 30


def save_for_ever(run: Path) -> None:
    """Every save is the best, and removes the one before."""
    torch.set_num_threads(1)
    os.fsync = lambda fd: None
    store = Store(run / "checkpoints", keep_last=1, best="top1")
    for step in range(1, 10**6):
        store.save(step, {"weight": torch.full((4,), float(step))}, {"step": step}, {"top1": float(step)})
        time.sleep(0.1)


@pytest.fixture
def running(tmp_path: Path) -> Any:
    process = FORK.Process(target=save_for_ever, args=(tmp_path / "run",))
    process.start()
    deadline = time.monotonic() + TIMEOUT
    while not (tmp_path / "run/best").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    yield tmp_path / "run"
    process.kill()
    process.join()


def open_often(place: Path, open_one: Callable[[World, Path], Any]) -> Callable[[World], Any]:
    def work(world: World) -> list[list[float]]:
        found: list[list[float]] = []
        while len(found) < OPENINGS or found[-1] == found[0]:  # until the run has saved meanwhile
            opened = open_one(world, place)
            found.append([opened.step, opened.model["weight"][0].item(), opened.state["step"]])
        return found

    return work


def together(world: World, place: Path) -> Any:
    return read_together(world, lambda: open_checkpoint(place), open_checkpoint)


@pytest.mark.parametrize("place", ["best", "."])
def test_all_open_the_same_while_a_run_saves(running: Path, place: str, tmp_path: Path) -> None:
    first, *others = in_processes(tmp_path, open_often(running / place, together))
    assert len(first) >= OPENINGS
    assert [each for each in others if each != first] == []
    assert [each for each in first if len(set(each)) != 1] == [], "step, weights and state belong together"
    assert first[-1] > first[0], "the run saved meanwhile"


def test_weights_of_a_run_are_the_same_in_all(running: Path, tmp_path: Path) -> None:
    def work(world: World) -> list[float]:
        opened = [read_together(world, lambda: find_weights(running / "best"), find_weights) for _ in range(5)]
        return [each.tensors["weight"][0].item() for each in opened if each is not None]

    first, *others = in_processes(tmp_path, work)
    assert len(first) == 5
    assert others == [first, first]


def test_one_process_that_cannot_read_it_ends_all_with_one_error(tmp_path: Path) -> None:
    path = Store(tmp_path / "checkpoints").save(1, {"weight": torch.zeros(1)}, {}, {}).path

    def open_if_allowed(world: World) -> Any:
        def follow(chosen: Path) -> Any:
            if world.rank == 2:
                raise CheckpointError(f"{chosen}: cannot be read: Permission denied")
            return open_checkpoint(chosen)

        return read_together(world, lambda: open_checkpoint(path), follow)

    first, *others = in_processes(tmp_path, open_if_allowed)
    assert first[0] == 4
    assert first[1].startswith(f"process 2 of {WORLD}: {path.resolve()}: ")
    assert others == [first, first]


def test_the_first_process_decides_and_its_error_is_that_of_all(tmp_path: Path) -> None:
    def choose() -> None:
        raise DataError("nothing there")

    assert in_processes(tmp_path / "one", lambda world: decide(world, choose)) == [[3, "nothing there"]] * WORLD
    found = in_processes(tmp_path / "two", lambda world: decide(world, lambda: [world.rank, "\udcff", None]))
    assert found == [[0, "\udcff", None]] * WORLD


def test_what_differs_is_reported_by_the_process_that_differs(tmp_path: Path) -> None:
    def work(world: World) -> None:
        check_same(world, {"size": 7}, lambda first: "not asked", DataError)
        check_same(world, {"size": 7 + world.rank // 2}, lambda first: f"8, and {first['size']} there", DataError)

    assert in_processes(tmp_path, work) == [[3, f"process 2 of {WORLD}: 8, and 7 there"]] * WORLD
