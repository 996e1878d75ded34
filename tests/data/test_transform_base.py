"""Threads, processes and measuring: the same batches in the same order, failures by name, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.core.errors import DataError
from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.data.batch import Batch, Sample
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.loader import Kind, Request, TrainBatches, load
from paceline.data.sampler import BatchSampler
from paceline.data.skip_list import SkipList
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.base import BatchTransform, SampleTransform
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.geometric import RandomHorizontalFlip, RandomResizedCrop

SIZE, BATCH, MICRO, STEPS = 30, 12, 4, 7
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
Place = tuple[int, int]


@dataclass(frozen=True)
class Darken:
    """Darkens by what is drawn."""

    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: npt.NDArray[np.float64]) -> Sample:
        return {**sample, "image": (sample["image"] * draws[0]).astype(np.uint8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of different sizes, some much larger than what is cut out of them."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(SIZE):
        path = root / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        height, width = generator.integers(40, 160, 2)
        coarse = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        assert cv2.imwrite(str(path), cv2.resize(coarse, (int(width), int(height))))
    return root


def batches(folder: Path, kind: Kind, workers: int | None, step: int = 0) -> TrainBatches:
    updates = BatchSampler(SIZE, BATCH, MICRO)
    transforms: list[SampleTransform | BatchTransform] = [
        RandomResizedCrop(24),
        Darken(),
        RandomHorizontalFlip(),
        Normalize([0.5], [0.25]),
    ]
    return TrainBatches(
        SplitLoader(ImageFolder(folder), transforms, seed=5),
        updates,
        World(0, 1, 0, CPU),
        Progress(STEPS, updates.steps_per_epoch, step),
        workers,
        kind=kind,
    )


def held(stream: TrainBatches) -> dict[Place, Batch]:
    return {
        (micro.step, micro.index): stream.source.transform_batch(micro.batch, micro.epoch, CPU)
        for update in stream
        for micro in update.micro_batches
    }


def same(one: dict[Place, Batch], other: dict[Place, Batch]) -> bool:
    return list(one) == list(other) and all(
        torch.equal(one[place][name], other[place][name]) for place in one for name in one[place]
    )


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[Place, Batch]:
    return held(batches(folder, "process", 0))


@pytest.mark.parametrize(
    ("kind", "workers"), [("thread", 1), ("thread", 4), ("process", 1), ("process", 4), ("auto", None), ("auto", 0)]
)
def test_nothing_about_loading_changes_a_pixel(
    folder: Path, reference: dict[Place, Batch], kind: Kind, workers: int | None
) -> None:
    assert same(held(batches(folder, kind, workers)), reference)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_nor_does_starting_in_the_middle(folder: Path, reference: dict[Place, Batch], step: int) -> None:
    rest = {place: batch for place, batch in reference.items() if place[0] >= step}
    for kind, workers in (("thread", 4), ("auto", None)):
        assert same(held(batches(folder, kind, workers, step)), rest)  # type: ignore[arg-type]
    if step == 4:
        assert same(held(batches(folder, "process", 2, step)), rest)


# --- failures and ends --------------------------------------------------------------------------------------


def _refuse(index: int) -> None:
    raise DataError(f"sample {index} is no image")


@dataclass
class Numbers:
    """Images that are their number; something may happen at some of them, and who read what is kept."""

    broken: frozenset[int] = frozenset()
    act: Callable[[int], None] = _refuse
    reads: list[int] = field(default_factory=list)
    classes: list[str] = field(default_factory=lambda: ["all"])
    channels: int = 1

    def __len__(self) -> int:
        return 40

    def read(self, index: int) -> Sample:
        self.reads.append(index)
        if index in self.broken:
            self.act(index)
        return {"image": np.full((2, 3, 1), index, np.uint8), "label": 0}


def requests(number: int = 20) -> Iterator[Request]:
    return (Request(0, np.array([2 * k, 2 * k + 1])) for k in range(number))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


KINDS = pytest.mark.parametrize(("kind", "workers"), [("thread", 3), ("auto", None), ("process", 2)])


@KINDS
@pytest.mark.parametrize("broken", [0, 5, 27])
def test_an_error_comes_as_itself_after_the_batches_before_it(kind: Kind, workers: int | None, broken: int) -> None:
    stream = load(SplitLoader(Numbers(frozenset({broken})), [], 0), requests(), workers, kind)
    found = [next(stream).ids.tolist() for _ in range(broken // 2)]
    assert found == [[2 * k, 2 * k + 1] for k in range(broken // 2)]
    with pytest.raises(DataError, match=f"^sample {broken} is no image$") as caught:
        next(stream)
    assert type(caught.value) is DataError
    assert loader_threads() == []


@KINDS
def test_what_cannot_be_read_is_left_out_if_it_may(kind: Kind, workers: int | None) -> None:
    source = SplitLoader(Numbers(frozenset({4, 10, 11})), [], 0, SkipList("train", 5))
    found = list(load(source, requests(), workers, kind))
    assert [batch.ids.tolist() for batch in found[:4]] == [[0, 1], [2, 3], [5], [6, 7]]
    assert (found[5].is_placeholder, found[5].ids.tolist()) == (True, [12, 12])
    assert [each.sample for batch in found for each in batch.skipped] == [4, 10, 11]


def test_a_mistake_in_a_program_is_not_hidden() -> None:
    def fail(index: int) -> None:
        raise KeyError("label")

    source = SplitLoader(Numbers(frozenset({3}), fail), [], 0, SkipList("train", 5))
    with pytest.raises(DataError, match=r"test_transform_base\.py:\d+: KeyError: .label."):
        list(load(source, requests(), 2, "thread"))


@pytest.mark.parametrize("taken", [0, 1, 6, 20])
@pytest.mark.parametrize(("kind", "workers"), [("thread", 3), ("auto", None)])
def test_threads_end_with_the_iterator(kind: Kind, workers: int | None, taken: int) -> None:
    with closing(load(SplitLoader(Numbers(), [], 0), requests(), workers, kind)) as stream:  # type: ignore[type-var]
        for _ in range(taken):
            next(stream)
    assert loader_threads() == []


def test_threads_do_not_read_far_ahead() -> None:
    numbers = Numbers()
    asked = []

    def counted() -> Iterator[Request]:
        for request in requests():
            asked.append(request)
            yield request

    with closing(load(SplitLoader(numbers, [], 0), counted(), 2, "thread")) as stream:  # type: ignore[type-var]
        for taken in range(1, 5):
            next(stream)
            assert len(asked) <= taken + 5
