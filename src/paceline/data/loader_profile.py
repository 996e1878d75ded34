"""The loader of a split, measured on a few samples: the time of each stage, and the mean and std of its images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular
from paceline.core.text import evenly_spaced
from paceline.data.batch import Batch, Sample
from paceline.data.prefetch import map_in_order
from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import Dataset, SplitLoader, TransformPipeline
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.functional import channel_axis

Bound = Literal["disk", "decode", "augment", "memory"]

NUM_MEASURED = 64
"""Samples of a split that `paceline check` and `paceline data` measure."""
_MAX_SECONDS = 3.0  # for each of the two measurements
_BATCH = 256  # samples of a batch that is taken from memory


class LoaderProfile(NamedTuple):
    """Seconds that a sample takes in one thread, by what they are spent on, and the speed of all threads together."""

    read: float
    decode: float
    """With a first transform that decodes no more than it needs, such as `resize` or `clip`."""
    transform: float
    bytes: int
    """Of its files, on average."""
    stays_in_memory: bool
    """Whether the files of the split take less than half of the machine's memory: the disk is then needed but once."""
    samples: int
    """How many were measured."""
    threads: int
    samples_per_second: float
    in_memory: bool = False

    @property
    def bound(self) -> Bound:
        """What takes most of the time."""
        if self.in_memory:
            return "memory"
        if not self.stays_in_memory and self.read > max(self.decode, self.transform):
            return "disk"
        return "decode" if self.decode >= self.transform else "augment"


def profile_loader(source: SplitLoader, ids: Sequence[int], threads: int) -> LoaderProfile:
    """The stages of loading these samples, as far as a few seconds allow.

    Files are read after the system was asked to forget them, so that the disk counts; then decoded and transformed
    from memory. The speed is that of `threads` threads which find the files in memory.
    """
    if source.in_memory:
        return _from_memory(source, ids)
    pipeline = TransformPipeline(source.dataset, source.sample_transforms, source.seed)
    is_fused = any(getattr(each, "reads_encoded", False) for each in source.sample_transforms[:1])
    read, decode, total, length = 0.0, 0.0, 0.0, 0
    done: list[int] = []
    until = perf_counter() + _MAX_SECONDS
    for index in ids:
        seconds, size = _read_from_disk(source.dataset, index)
        read, length = read + seconds, length + size
        if not done:
            _load(pipeline, index)  # the first one opens libraries, and is not counted
        begin = perf_counter()
        _load(pipeline, index, stop=int(is_fused))
        between = perf_counter()
        _load(pipeline, index)
        decode, total = decode + between - begin, total + perf_counter() - between
        done.append(index)
        if perf_counter() > until:
            break
    number = len(done)
    size = length // number
    parts = read / number, min(decode, total) / number, max(0.0, total - decode) / number
    is_small = size * len(source.dataset) < _memory() / 2
    return LoaderProfile(*parts, size, is_small, number, threads, _speed(pipeline, done, threads))


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _speed(pipeline: TransformPipeline, ids: list[int], threads: int) -> float:
    begin, number = perf_counter(), 0
    samples = map_in_order(partial(_load, pipeline), ids * 4, threads, 4 * threads)
    with closing(samples) as loaded:  # type: ignore[type-var]  # threads end with it
        for _ in loaded:
            number += 1
            if perf_counter() > begin + _MAX_SECONDS:
                break
    return number / (perf_counter() - begin)


def _from_memory(source: SplitLoader, ids: Sequence[int]) -> LoaderProfile:
    batches = [np.array(ids[start : start + _BATCH]) for start in range(0, len(ids), _BATCH)]
    begin = perf_counter()
    for batch in batches:
        source.fetch(0, batch)
    seconds = perf_counter() - begin
    return LoaderProfile(0.0, 0.0, 0.0, 0, True, len(ids), 1, len(ids) / seconds, in_memory=True)


def _load(pipeline: TransformPipeline, index: int, stop: int | None = None) -> Sample:
    return pipeline.sample(0, index, pipeline.draw(0, np.array([index]))[0], stop)


def _read_from_disk(dataset: Dataset, index: int) -> tuple[float, int]:
    """Seconds that the files of a sample take to read, and their bytes; none if there are no files of its own."""
    seconds, length = 0.0, 0
    for name in ("path", "mask_path"):
        find: Callable[[int], Path] | None = getattr(dataset, name, None)
        if find is None or (len(dataset) > 1 and find(0) == find(1)):  # all in one file, as in a pack
            continue
        with suppress(OSError):  # what a data set calls a path may be any name
            taken, size = _read_uncached(find(index))
            seconds, length = seconds + taken, length + size
    return seconds, length


def _read_uncached(path: Path) -> tuple[float, int]:
    with open_regular(path, buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = perf_counter()
        size = len(file.read())
        return perf_counter() - begin, size


_TOGETHER = 8  # samples of a batch: transforms of whole batches may need several
_CPU = torch.device("cpu")
# Photos normalized with other photos' mean and std stay well within these.
_MAX_MEAN, _MIN_STD, _MAX_STD = 1.0, 0.4, 2.0
_MAX_SHIFT, _MAX_RATIO = 0.5, 1.5  # between splits: augmentation changes images too


class InputStats(NamedTuple):
    """Of each channel, over all pixels of some samples after their transforms."""

    mean: list[float]
    std: list[float]
    is_normalized: bool
    """Whether there is a `normalize`, or the data set gives floats, which are taken as they are."""

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.2f}" for value in values) for values in (self.mean, self.std))
        return f"mean [{mean}], std [{std}]"


def input_stats(loader: SplitLoader, ids: Sequence[int]) -> InputStats | None:
    """The statistics of some of these samples in the first epoch; None if none of them can be read."""
    ids = [ids[place] for place in evenly_spaced(len(ids), NUM_MEASURED)]
    total = squares = torch.zeros(0, dtype=torch.float64)
    count, is_float = 0, False
    for batch in transformed_batches(loader, ids, _TOGETHER, []):
        images: Tensor = batch["image"]
        is_float = is_float or bool((images.amin() < 0) | (images.amax() > 1))
        values = images.double().movedim(channel_axis(images), 0).flatten(1)
        sums = values.sum(1), values.square().sum(1)
        total, squares = sums if not count else (total + sums[0], squares + sums[1])
        count += values.shape[1]
    if not count:
        return None
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt()
    has_normalize = any(isinstance(each, Normalize) for each in loader.batch_transforms)
    return InputStats(mean.tolist(), std.tolist(), has_normalize or is_float)


def transformed_batches(
    loader: SplitLoader, ids: Sequence[int], num_together: int, problems: list[str]
) -> Iterator[Batch]:
    """Samples after all transforms of the first epoch: so many at a time, or each on its own where they do not fit.

    Why some cannot be loaded, or not be a batch, is added to `problems`.
    """
    for start in range(0, len(ids), num_together):
        some = ids[start : start + num_together]
        try:
            batches = [_transformed(loader, some)]
        except UNREADABLE as error:
            problems.append(str(error))
            batches = []
            for index in some if len(some) > 1 else ():
                try:
                    batches.append(_transformed(loader, [index]))
                except UNREADABLE as own:
                    problems.append(str(own))
        yield from batches


def _transformed(loader: SplitLoader, ids: Sequence[int]) -> Batch:
    fetched = loader.fetch(0, np.array(ids, np.int64))
    if fetched.is_placeholder:
        raise DataError("; ".join(map(str, fetched.skipped)))
    return loader.transform_batch(fetched, 0, _CPU)


def input_warnings(splits: Mapping[str, InputStats]) -> list[str]:
    """What is suspicious: images that are not normalized, far from mean 0 and std 1, or different between splits."""
    found = []
    raw = [split for split, stats in splits.items() if not stats.is_normalized]
    if raw:
        first = splits[raw[0]]
        mean, std = ([round(value, 3) for value in values] for values in (first.mean, first.std))
        own = f"{{name: normalize, mean: {mean}, std: {std}}}"
        cure = own if raw[0] == next(iter(splits)) else f"as data.{next(iter(splits))} has it"
        where = ", ".join(f"data.{split}" for split in raw)
        found.append(f"{where}: images are not normalized ({first}); add `normalize` to their transforms, {cure}")
    for split, stats in splits.items():
        is_odd = max(map(abs, stats.mean)) > _MAX_MEAN or not _MIN_STD < min(stats.std) <= max(stats.std) < _MAX_STD
        if stats.is_normalized and is_odd:
            found.append(f"data.{split}: images have {stats}, expected about 0 and 1; check `normalize`")
    names = list(splits)
    for other in names[1:]:
        if _differ(splits[names[0]], splits[other]):
            both = f"data.{names[0]} {splits[names[0]]}, data.{other} {splits[other]}"
            found.append(f"images differ between splits: {both}; check their transforms")
    return found


def _differ(first: InputStats, second: InputStats) -> bool:
    if len(first.mean) != len(second.mean) or first.is_normalized != second.is_normalized:
        return True
    for mean, std, other_mean, other_std in zip(*first[:2], *second[:2], strict=True):
        smaller, larger = sorted((std, other_std))
        if abs(mean - other_mean) > _MAX_SHIFT * larger or larger > _MAX_RATIO * smaller:
            return True
    return False
