"""Decoded samples in memory: read once whoever reads them, whole after a kill, and gone in the end."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import DataError
from paceline.core.world import World
from paceline.data import cache as memory_room
from paceline.data.batch import Sample
from paceline.data.cache import Cached, estimated_bytes, keep_in_memory
from paceline.data.loader import Request, load
from paceline.data.split_loader import SplitLoader

ALONE = World(0, 1, 0, torch.device("cpu"))
SIZE = 24


@dataclass
class Images:
    """Samples with everything in them; each read is a line in a file, whatever process it happens in."""

    log: Path
    broken: int | None = None
    classes: list[str] = field(default_factory=lambda: ["a", "b"])
    channels: int = 3
    joints: str = "names"

    def __len__(self) -> int:
        return SIZE

    def open(self, index: int) -> Sample:
        raise AssertionError("images must be decoded whole")

    def read(self, index: int) -> Sample:
        if index == self.broken:
            raise DataError(f"sample {index} is no image")
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        generator = np.random.default_rng(index)
        return {
            "image": generator.integers(0, 256, (8, 9, 3), dtype=np.uint8),
            "label": index,
            "boxes": generator.random((index % 3, 4)).astype(np.float32),
            "size": np.array([8, 9]),
        }

    def path(self, index: int) -> Path:
        return Path(f"{index}.jpg")

    def reads(self) -> list[int]:
        return sorted(map(int, self.log.read_text().split())) if self.log.exists() else []


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "reads")


@pytest.fixture
def cached(images: Images, monkeypatch: pytest.MonkeyPatch) -> Cached:
    monkeypatch.setattr(memory_room, "_bytes_at", lambda dataset, index: 2000)
    return keep_in_memory(images, ALONE, pytest.fail)


def equal(one: Sample, other: Sample) -> bool:
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


def test_samples_come_back_as_they_were_and_are_read_once(cached: Cached, images: Images, tmp_path: Path) -> None:
    plain = Images(tmp_path / "others")
    for _ in range(3):
        for index in range(SIZE):
            found, expected = cached.read(index), plain.read(index)
            assert equal(found, expected)
            assert found["image"].dtype == np.uint8
            assert type(found["label"]) is int
    assert images.reads() == list(range(SIZE))
    assert cached.num_kept == SIZE
    with pytest.raises(ValueError, match="read-only"):
        cached.read(0)["image"][:] = 0


def test_it_is_the_data_set_otherwise_but_nothing_is_left_encoded(cached: Cached) -> None:
    assert (len(cached), cached.classes, cached.channels, cached.joints) == (SIZE, ["a", "b"], 3, "names")
    assert cached.path(3) == Path("3.jpg")
    assert not hasattr(cached, "open")
    assert not hasattr(cached, "gather")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_workers_share_it(cached: Cached, images: Images, kind: Any) -> None:
    source = SplitLoader(cached, [], 0)
    requests = [Request(0, np.arange(start, start + 4)) for start in range(0, SIZE, 4)]
    first, again = (list(load(source, requests, 2, kind)) for _ in range(2))
    assert all(torch.equal(one["image"], other["image"]) for one, other in zip(first, again, strict=True))
    assert cached.num_kept == SIZE
    assert images.reads() == list(range(SIZE))


def test_many_threads_that_read_the_same(cached: Cached, tmp_path: Path) -> None:
    plain, wrong = Images(tmp_path / "others"), list[int]()

    def read_all() -> None:
        wrong.extend(index for index in range(SIZE) if not equal(cached.read(index), plain.read(index)))

    threads = [threading.Thread(target=read_all) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_process_that_is_killed_leaves_nothing_half_done(cached: Cached, images: Images, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        cached._reserve(1000)  # killed after it took the room and before it said what lies there
        cached.read(1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert cached.num_kept == 1
    assert all(equal(cached.read(index), Images(tmp_path / "others").read(index)) for index in range(SIZE))
    assert images.reads() == list(range(SIZE))


def test_a_fresh_process_finds_the_same_memory(cached: Cached, images: Images) -> None:
    cached.read(5)
    other = pickle.loads(pickle.dumps(cached))
    assert other.num_kept == 1
    assert equal(other.read(5), cached.read(5))
    assert images.reads() == [5]


def test_no_file_is_left_while_it_is_used(images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "_SHARED_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(memory_room, "_bytes_at", lambda dataset, index: 2000)
    (tmp_path / "memory").mkdir()
    assert keep_in_memory(images, ALONE, pytest.fail).read(1)["label"] == 1
    assert list((tmp_path / "memory").iterdir()) == []


def test_no_file_is_left_by_a_process_that_is_killed_while_others_open_it(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[Path] = []

    class Watched(World):
        def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            names.extend(tmp_path.iterdir())
            return super().gather(tensor)

    monkeypatch.setattr(memory_room, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(memory_room, "_bytes_at", lambda dataset, index: 2000)
    assert keep_in_memory(images, Watched(0, 1, 0, torch.device("cpu")), print).num_kept == 0
    assert names == []


def test_what_does_not_fit_is_reported_and_read_again(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "_bytes_at", lambda dataset, index: 10**9)
    monkeypatch.setattr(memory_room, "free_bytes", lambda folder: 40 * 10**9)
    reported: list[str] = []
    cached = keep_in_memory(images, ALONE, reported.append, promised=10**10)
    assert reported == [
        "data.cache: samples are not kept in memory: about 26.4 GB are needed, and 15.0 GB is half of what is free;"
        " they are decoded every time"
    ]
    assert [cached.read(2)["label"] for _ in range(2)] == [2, 2]
    assert (cached.num_kept, images.reads(), hasattr(cached, "open")) == (0, [2, 2], False)


def test_more_than_was_estimated_is_read_anew(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "_bytes_at", lambda dataset, index: 200)
    cached = keep_in_memory(images, ALONE, pytest.fail)
    for _ in range(2):
        assert [cached.read(index)["label"] for index in range(SIZE)] == list(range(SIZE))
    assert 0 < cached.num_kept < SIZE


def test_errors_pass_through_and_are_not_kept(cached: Cached, images: Images) -> None:
    images.broken = 4
    for _ in range(2):
        with pytest.raises(DataError, match="sample 4 is no image"):
            cached.read(4)
    images.broken = None
    assert cached.read(4)["label"] == 4


def test_the_estimate_is_what_is_needed(tmp_path: Path) -> None:
    class Plain(Images):
        open = Images.read

    plain = Plain(tmp_path / "reads", broken=7)
    estimated = estimated_bytes(plain)
    cached = keep_in_memory(plain, ALONE, pytest.fail)
    plain.broken = None
    for index in range(SIZE):
        cached.read(index)
    assert cached.num_kept == SIZE
    assert estimated < 2 * int(cached._state[0])
