"""The loader of a split, measured on a few samples: its speed, and the mean and std of its images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.text import evenly_spaced
from paceline.core.threads import map_in_order
from paceline.data.batch import IMAGE_SIZE, Batch
from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.functional import channel_axis

NUM_MEASURED = 64
"""Samples of a split that `paceline check` and `paceline data` measure."""
_MAX_SECONDS = 3.0
_BATCH = 256  # samples of a batch that is taken from memory


def loading_speed(source: SplitLoader, ids: Sequence[int], threads: int) -> float:
    """How many of these samples load in a second, as far as a few seconds allow; those in memory by one thread."""
    size, threads = (_BATCH, 1) if source.in_memory else (1, threads)
    batches = [np.array(ids[start : start + size]) for start in range(0, len(ids), size)]
    source.fetch(0, batches[0])  # the first one opens libraries, and is not counted
    begin, number = perf_counter(), 0
    fetched = map_in_order(partial(source.fetch, 0), batches * 4, threads, 4 * threads)
    with closing(fetched) as loaded:  # type: ignore[type-var]  # threads end with it
        for batch in loaded:
            number += batch.size
            if perf_counter() > begin + _MAX_SECONDS:
                break
    return number / (perf_counter() - begin)


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
