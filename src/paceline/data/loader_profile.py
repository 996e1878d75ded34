"""The loader of a split, measured on a few samples: the time of each stage, and the mean and std of its images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.text import evenly_spaced
from paceline.core.threads import map_in_order
from paceline.data.batch import IMAGE_SIZE, Batch, Sample
from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import SplitLoader, TransformPipeline
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.functional import channel_axis

Bound = Literal["decode", "augment", "memory"]

NUM_MEASURED = 64
"""Samples of a split that `paceline check` and `paceline data` measure."""
_MAX_SECONDS = 3.0  # for each of the two measurements
_BATCH = 256  # samples of a batch that is taken from memory


class LoaderProfile(NamedTuple):
    """Seconds that a sample takes in one thread, by what they are spent on, and the speed of all threads together."""

    decode: float
    """With reading the file, and a first transform that decodes no more than it needs, such as `resize` or `clip`."""
    transform: float
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
        return "decode" if self.decode >= self.transform else "augment"


def profile_loader(source: SplitLoader, ids: Sequence[int], threads: int) -> LoaderProfile:
    """The stages of loading these samples, as far as a few seconds allow, and the speed of `threads` threads."""
    if source.in_memory:
        return _from_memory(source, ids)
    pipeline = TransformPipeline(source.dataset, source.sample_transforms, source.seed)
    is_fused = any(getattr(each, "reads_encoded", False) for each in source.sample_transforms[:1])
    _load(pipeline, ids[0])  # the first one opens libraries, and is not counted
    decode, total, done = 0.0, 0.0, list[int]()
    until = perf_counter() + _MAX_SECONDS
    for index in ids:
        begin = perf_counter()
        _load(pipeline, index, stop=int(is_fused))
        between = perf_counter()
        _load(pipeline, index)
        decode, total = decode + between - begin, total + perf_counter() - between
        done.append(index)
        if perf_counter() > until:
            break
    parts = min(decode, total) / len(done), max(0.0, total - decode) / len(done)
    return LoaderProfile(*parts, len(done), threads, _speed(pipeline, done, threads))


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
    return LoaderProfile(0.0, 0.0, len(ids), 1, len(ids) / (perf_counter() - begin), in_memory=True)


def _load(pipeline: TransformPipeline, index: int, stop: int | None = None) -> Sample:
    return pipeline.sample(0, index, pipeline.draw(0, np.array([index]))[0], stop)


_TOGETHER = 8  # samples of a batch: transforms of whole batches may need several
_CPU = torch.device("cpu")
# Photos normalized with other photos' mean and std stay well within these.
_MAX_MEAN, _MIN_STD, _MAX_STD = 1.0, 0.4, 2.0


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
    for images in _transformed_images(loader, ids):
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


def _transformed_images(loader: SplitLoader, ids: Sequence[int]) -> Iterator[Tensor]:
    """Images of one size together, [N, C, H, W] or more; others one by one, without their padding."""
    for batch in transformed_batches(loader, ids, _TOGETHER, []):
        if IMAGE_SIZE in batch:
            yield from (batch.image(index)[None] for index in range(batch.size))
        else:
            yield batch["image"]


def transformed_batches(
    loader: SplitLoader, ids: Sequence[int], num_together: int, problems: list[str]
) -> Iterator[Batch]:
    """Samples after all transforms of the first epoch: so many at a time, or each on its own where they do not fit.

    Why some cannot be loaded, or not be a batch, is added to `problems`.
    """
    for start in range(0, len(ids), num_together):
        some = ids[start : start + num_together]
        try:
            batch = _transformed(loader, some)
        except UNREADABLE as error:
            problems.append(str(error))
            if len(some) > 1:
                yield from transformed_batches(loader, some, 1, problems)
        else:
            yield batch


def _transformed(loader: SplitLoader, ids: Sequence[int]) -> Batch:
    fetched = loader.fetch(0, np.array(ids, np.int64))
    if fetched.is_placeholder:
        raise DataError("; ".join(map(str, fetched.skipped)))
    return loader.transform_batch(fetched, 0, _CPU)


def input_warnings(splits: Mapping[str, InputStats]) -> list[str]:
    """What is suspicious: images that are not normalized, or far from mean 0 and std 1."""
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
    return found
