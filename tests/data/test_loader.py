"""Batches in the order of the run, the same for any number of workers; and errors of workers."""

import multiprocessing
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
import torch

from paceline.core.errors import DataError
from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.data.batch import Batch, Sample
from paceline.data.loader import Request, StepBatch, TrainBatches, load
from paceline.data.sampler import BatchSampler, Permutation
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.geometric import RandomCrop, RandomHorizontalFlip, RandomResizedCrop

SIZE, BATCH, MICRO = 53, 16, 6
CPU = torch.device("cpu")
TIMEOUT = 120


@dataclass
class Images:
    """Images of random sizes, all functions of their number; number `broken` cannot be read."""

    broken: int | None = None
    classes: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    channels: int = 3

    def __len__(self) -> int:
        return SIZE

    def read(self, index: int) -> Sample:
        if index == self.broken:
            raise DataError(f"image {index} cannot be decoded: expected a JPEG, found text; replace the file")
        generator = np.random.default_rng(index)
        height, width = generator.integers(9, 14, 2)
        return {"image": generator.integers(0, 256, (height, width, 3), dtype=np.uint8), "label": index % 3}


def batches(workers: int, step: int = 0, rank: int = 0, world: int = 1, broken: int | None = None) -> TrainBatches:
    updates = BatchSampler(SIZE, BATCH, MICRO)
    return TrainBatches(
        SplitLoader(Images(broken), [RandomResizedCrop(8), RandomCrop(8, padding=1), RandomHorizontalFlip()], seed=5),
        updates,
        World(rank, world, rank, CPU),
        Progress(10, updates.steps_per_epoch, step),
        workers,
        kind="process",
    )


def held(stream: TrainBatches) -> dict[tuple[int, int], Batch]:
    """Every micro-batch by step and index, as the model gets it."""
    return {
        (micro.step, micro.index): stream.source.transform_batch(micro.batch, micro.epoch, CPU)
        for update in stream
        for micro in update.micro_batches
    }


def same(one: dict[tuple[int, int], Batch], other: dict[tuple[int, int], Batch]) -> bool:
    return list(one) == list(other) and all(
        list(one[key]) == list(other[key]) and all(torch.equal(one[key][name], other[key][name]) for name in one[key])
        for key in one
    )


@pytest.fixture(scope="module")
def reference() -> dict[tuple[int, int], Batch]:
    return held(batches(workers=0))


def test_updates_follow_the_order_and_the_cuts(reference: dict[tuple[int, int], Batch]) -> None:
    order, steps_per_epoch = Permutation(SIZE, 5), 4
    for epoch in range(3):
        steps = [step for step in range(10) if step // steps_per_epoch == epoch]
        ids = [int(i) for key, batch in reference.items() if key[0] in steps for i in batch.ids]
        assert ids == order.at(epoch, 0, len(ids)).tolist()
        assert len(ids) == (SIZE if epoch < 2 else 2 * BATCH)
    sizes = [batch.size for (step, _), batch in reference.items() if step in (0, 3)]
    assert sizes == [5, 5, 6, 5]


def test_an_update_counts_all_its_samples_and_micro_batches() -> None:
    for world in (1, 2, 5):
        for rank in range(world):
            found = [(u.step, u.num_samples, u.num_micro_batches) for u in islice(batches(0, 0, rank, world), 4)]
            assert found == [(0, 16, 3), (1, 16, 3), (2, 16, 3), (3, 5, 1)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(workers: int, reference: dict[tuple[int, int], Batch]) -> None:
    assert same(held(batches(workers)), reference)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "step"), [(0, 1), (0, 6), (3, 6), (0, 10)])
def test_starting_in_the_middle_changes_nothing(
    workers: int, step: int, reference: dict[tuple[int, int], Batch]
) -> None:
    rest = {key: batch for key, batch in reference.items() if key[0] >= step}
    assert same(held(batches(workers, step)), rest)


def test_iterating_again_goes_on_from_where_the_run_stands(reference: dict[tuple[int, int], Batch]) -> None:
    stream = batches(workers=0)
    next(iter(stream))
    assert held(stream).keys() == reference.keys()
    stream.progress.step = 7
    assert {step for step, _ in held(stream)} == {7, 8, 9}


@pytest.mark.parametrize("world", [2, 3, 7])
def test_processes_share_the_micro_batches(world: int, reference: dict[tuple[int, int], Batch]) -> None:
    shares = [held(batches(0, 0, rank, world)) for rank in range(world)]
    together = dict(sorted(pair for share in shares for pair in share.items()))
    assert sum(len(share) for share in shares) == len(reference)
    assert same(together, reference)


def test_a_rank_without_micro_batches_still_has_every_update() -> None:
    updates: list[StepBatch] = list(batches(0, 0, rank=6, world=7))
    assert [update.step for update in updates] == list(range(10))
    assert all(update.micro_batches == [] for update in updates)


def test_workers_outlast_stop_signals_and_end_with_the_process_that_started_them() -> None:
    """A run that was asked to stop, as all processes are by schedulers and terminals, needs them for one more step."""
    before = multiprocessing.active_children()  # of other tests
    stream = iter(batches(2))
    next(stream)
    workers = [each for each in multiprocessing.active_children() if each not in before]
    assert len(workers) == 2
    for name in ("TERM", "HUP", "USR1", "INT"):
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    assert len(list(islice(stream, 3))) == 3
    assert [worker.exitcode for worker in workers] == [None, None]
    for worker in workers:
        worker.terminate()
        worker.join(TIMEOUT)
    assert [worker.exitcode for worker in workers] == [0, 0]


def requests() -> Iterator[Request]:
    return (Request(0, np.array([number])) for number in range(SIZE))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_error_arrives_as_itself(workers: int) -> None:
    stream = load(SplitLoader(Images(broken=3), [], seed=0), requests(), workers)
    assert [next(stream).ids.tolist() for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(DataError) as caught:
        next(stream)
    assert str(caught.value) == "image 3 cannot be decoded: expected a JPEG, found text; replace the file"
    assert type(caught.value) is DataError
