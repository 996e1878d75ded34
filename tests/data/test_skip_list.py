"""Samples that cannot be read: left out without touching the others, listed once, and not too many."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from paceline.core.errors import DataError
from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.data.batch import Batch, Sample
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.loader import MicroBatch, Request, TrainBatches, load
from paceline.data.sampler import BatchSampler
from paceline.data.skip_list import SkipList, Skipped, automatic_limit
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.geometric import RandomCrop, RandomHorizontalFlip, RandomResizedCrop, Resize

SIZE, BATCH, MICRO = 40, 12, 4
CPU = torch.device("cpu")
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def _refuse(index: int) -> None:
    raise DataError(f"sample {index} is no image")


@dataclass
class Images:
    """Images that are functions of their number; what happens at those that are broken is up to `act`."""

    broken: frozenset[int] = frozenset()
    act: Callable[[int], None] = _refuse
    classes: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    channels: int = 3

    def __len__(self) -> int:
        return SIZE

    def read(self, index: int) -> Sample:
        if index in self.broken:
            self.act(index)
        generator = np.random.default_rng(index)
        height, width = generator.integers(9, 14, 2)
        return {"image": generator.integers(0, 256, (height, width, 3), dtype=np.uint8), "label": index % 3}


def updates(broken: set[int], workers: int, limit: int = 20, rank: int = 0, world: int = 1) -> TrainBatches:
    cut = BatchSampler(SIZE, BATCH, MICRO)
    source = SplitLoader(
        Images(frozenset(broken)),
        [RandomResizedCrop(8), RandomCrop(8, padding=1), RandomHorizontalFlip()],
        5,
        SkipList("train", limit),
    )
    progress = Progress(8, cut.steps_per_epoch, 0)
    return TrainBatches(source, cut, World(rank, world, rank, CPU), progress, workers, kind="process")


def held(stream: TrainBatches) -> list[tuple[MicroBatch, Batch]]:
    with closing(stream.__iter__()) as updates_of_stream:  # type: ignore[type-var]
        return [
            (micro, stream.source.transform_batch(micro.batch, micro.epoch, CPU))
            for each in updates_of_stream
            for micro in each.micro_batches
        ]


def first_ids(stream: TrainBatches, micro: int) -> set[int]:
    return set(stream.order.at(0, *[(cut.start, cut.stop) for cut in stream.sampler.slices(0)][micro]).tolist())


@WORKERS
def test_the_others_are_what_they_would_have_been(workers: int) -> None:
    broken = {3, 17, 18, 39}
    whole, partial = held(updates(set(), 0)), held(updates(broken, workers))
    assert len(whole) == len(partial)
    for (before, expected), (after, found) in zip(whole, partial, strict=True):
        assert (after.step, after.index, after.is_padding) == (before.step, before.index, False)
        kept = torch.tensor([int(i) not in broken for i in expected.ids])
        assert torch.equal(found.ids, expected.ids[kept])
        assert torch.equal(found["image"], expected["image"][kept])
        assert torch.equal(found["label"], expected["label"][kept])
        left_out = [Skipped(int(i), None, f"sample {i} is no image") for i in expected.ids[~kept]]
        assert list(found.skipped) == left_out


@WORKERS
def test_a_micro_batch_without_readable_samples_is_computed_and_counts_nothing(workers: int) -> None:
    broken = first_ids(updates(set(), 0), 1)
    found = held(updates(broken, workers))
    micro, batch = found[1]
    assert (micro.step, micro.index, micro.is_padding, batch.is_placeholder) == (0, 1, True, True)
    assert batch.size == len(broken)
    assert len(set(batch.ids.tolist())) == 1
    assert broken.isdisjoint(batch.ids.tolist())
    assert {each.sample for each in batch.skipped} == broken
    assert not any(micro.is_padding for micro, _ in (found[0], found[2]))


def test_padding_of_other_processes_is_no_placeholder() -> None:
    stream = updates({3}, 0, rank=2, world=3)
    stream.passes = "equal"
    padding = [batch for micro, batch in held(stream) if micro.is_padding]
    assert padding
    assert not any(batch.is_placeholder for batch in padding)


def test_without_the_policy_the_first_one_ends_it() -> None:
    stream = updates({3}, 0)
    stream.source.skips = None
    with pytest.raises(DataError, match="sample 3 is no image"):
        held(stream)


@pytest.mark.parametrize("transforms", [[Resize((8, 8))], [RandomResizedCrop(8)]], ids=["resize", "crop"])
def test_a_damaged_file_names_the_key_that_skips_it(transforms: list[Any], tmp_path: Path) -> None:
    """Whether it is decoded before the transforms, or by the first of them."""
    (tmp_path / "a").mkdir()
    for number in range(4):
        cv2.imwrite(str(tmp_path / "a" / f"{number}.jpg"), np.full((16, 16, 3), 60 * number, np.uint8))
    damaged = tmp_path / "a" / "2.jpg"
    damaged.write_bytes(damaged.read_bytes()[:150])
    source = SplitLoader(ImageFolder(tmp_path), transforms, seed=0)
    with pytest.raises(DataError, match=r"a/2\.jpg: .*data\.on_error: skip"):
        source.fetch(0, np.arange(4))
    skipping = SplitLoader(ImageFolder(tmp_path), transforms, seed=0, skips=SkipList("train", 2))
    (skipped,) = skipping.fetch(0, np.arange(4)).skipped
    assert skipped.sample == 2
    assert "on_error" not in skipped.reason


@WORKERS
def test_too_many_end_it(workers: int) -> None:
    with pytest.raises(
        DataError, match=r"data\.train: 3 samples cannot be read, and data\.max_skipped allows 2"
    ) as one:
        held(updates({3, 17, 18, 39}, workers, limit=2))
    assert one.value.exit_code == 3


@WORKERS
def test_nothing_but_unreadable_samples_end_it(workers: int) -> None:
    with pytest.raises(DataError, match=r"more than 5 samples in a row cannot be read, .* data\.max_skipped .*sample"):
        held(updates(set(range(SIZE)), workers, limit=5))


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), ValueError("bad\nfield"), EOFError(), KeyError("x")]
)
def test_what_counts_as_unreadable(error: Exception) -> None:
    def fail(index: int) -> None:
        raise error

    source = SplitLoader(Images(frozenset({1}), fail), [Resize([8, 8])], 0, SkipList("val", 3))
    if isinstance(error, KeyError):  # a mistake in a program, not in a file
        with pytest.raises(DataError, match=r"test_skip_list\.py:\d+: KeyError: 'x'"):
            source.fetch(0, np.arange(3))
        return
    batch = source.fetch(0, np.arange(3))
    assert batch.ids.tolist() == [0, 2]
    assert batch.skipped[0].reason.startswith(type(error).__name__)
    assert batch.skipped[0].reason.isprintable()


def test_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for index in range(4):
        noise = np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / f"a/{index}.png"), noise)
    (tmp_path / "a/0.png").write_bytes(b"")
    (tmp_path / "a/1.png").write_bytes((tmp_path / "a/1.png").read_bytes()[:100])
    source = SplitLoader(ImageFolder(tmp_path), [], 0, SkipList("train", 3))
    (tmp_path / "a/3.png").unlink()
    batch = source.fetch(0, np.arange(4))
    assert batch.ids.tolist() == [2]
    assert [each.path for each in batch.skipped] == [str(tmp_path / f"a/{index}.png") for index in (0, 1, 3)]
    reasons = [each.reason for each in batch.skipped]
    assert (reasons[0], reasons[2]) == ("the file is empty (0 bytes)", "no such file")
    assert reasons[1].startswith("damaged or truncated image")
    assert str(batch.skipped[0]) == f"sample 0 ({tmp_path}/a/0.png): the file is empty (0 bytes)"


def test_batches_keep_what_they_lack_on_their_way() -> None:
    batch = SplitLoader(Images(frozenset({1})), [Resize([8, 8])], 0, SkipList("val", 3)).fetch(0, np.arange(3))
    for copy in (batch.to(CPU), pickle.loads(pickle.dumps(batch))):
        assert list(copy.skipped) == list(batch.skipped)
        assert not copy.is_placeholder
    assert Batch(id=torch.arange(3)).skipped == ()


# --- the list -----------------------------------------------------------------------------------------------


def opened(path: Path, split: str = "train", limit: int = 9) -> tuple[SkipList, list[str]]:
    heard: list[str] = []
    skips = SkipList(split, limit)
    skips.open(path, heard.append)
    return skips, heard


def bad(*samples: int) -> list[Skipped]:
    return [Skipped(sample, f"{sample}.jpg", "cut short") for sample in samples]


def test_each_is_recorded_and_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "skipped.jsonl"
    skips, heard = opened(path)
    skips.add(bad(4, 7))
    skips.add(bad(7, 2))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"split": "train", "sample": sample, "path": f"{sample}.jpg", "reason": "cut short"} for sample in (4, 7, 2)
    ]
    assert heard == [f"train: skipped sample {n} ({n}.jpg): cut short" for n in (4, 7, 2)]
    assert len(skips) == 3


def test_processes_and_restarts_share_the_list(tmp_path: Path) -> None:
    path = tmp_path / "skipped.jsonl"
    (first, heard_first), (second, heard_second) = opened(path, limit=3), opened(path, limit=3)
    other, _ = opened(path, "val", limit=1)
    first.add(bad(1, 2))
    second.add(bad(2, 3))
    other.add(bad(1))
    assert len(path.read_text().splitlines()) == 4
    assert (len(first), len(second), len(other)) == (2, 3, 1)
    first.refresh()
    first.refresh()
    assert heard_first == [f"train: skipped {each}" for each in bad(1, 2, 3)]
    assert heard_second == [f"train: skipped {each}" for each in bad(2, 3)]
    again, heard = opened(path, limit=3)
    again.add(bad(1, 2, 3))
    assert heard == []
    with pytest.raises(DataError, match=rf"4 samples cannot be read.*the last is sample 9.*listed in {path}"):
        again.add(bad(9))


def test_a_list_that_was_cut_short_or_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "skipped.jsonl"
    skips, _ = opened(path)
    skips.add(bad(1, 2))
    path.write_bytes(path.read_bytes()[:-10])
    again, _ = opened(path)
    again.add(bad(5))
    assert [json.loads(line)["sample"] for line in path.read_text().splitlines() if line.endswith("}")] == [1, 5]
    nowhere, heard = opened(tmp_path / "absent" / "skipped.jsonl")
    nowhere.add(bad(5))
    assert len(nowhere) == 1
    assert "cannot write to" in heard[0]


def test_the_automatic_limit() -> None:
    assert [automatic_limit(number) for number in (1, 100, 250, 9_999, 10_000, 10**7)] == [1, 1, 2, 99, 100, 100]


# --- workers that die ---------------------------------------------------------------------------------------


def _die(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_while_its_batch_is_received_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shared memory cannot be received any more, which is an EOFError or an OSError that names nothing."""

    def receive(self: Any, *_: Any) -> Any:
        os.kill(self._workers[0].pid, signal.SIGKILL)
        raise EOFError

    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data", receive)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # torch raises its own error at this signal
    try:
        with pytest.raises(DataError, match="a loader worker died"):
            next(load(SplitLoader(Images(), [Resize([8, 8])], 0), [Request(0, np.arange(4))], 1))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # the signal that waited finds no dead worker any more


def test_a_killed_worker_is_a_data_error() -> None:
    source = SplitLoader(Images(frozenset({13}), _die), [Resize([8, 8])], 0)
    requests = [Request(2, np.arange(start, start + 4)) for start in range(0, SIZE, 4)]
    with pytest.raises(DataError) as caught:
        list(load(source, requests, 1))
    printed = str(caught.value)
    assert "a loader worker died" in printed
