"""Mean and standard deviation of images as the model gets them, and what is suspicious about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.functional import channel_axis

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
    """The statistics of these samples in the first epoch; None if none of them can be read."""
    total = squares = torch.zeros(0, dtype=torch.float64)
    count, is_float = 0, False
    for images in _images(loader, ids):
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


def _images(loader: SplitLoader, ids: Sequence[int]) -> Iterator[Tensor]:
    """The images of a few samples at a time, or of each on its own where they do not fit together."""
    for start in range(0, len(ids), _TOGETHER):
        some = ids[start : start + _TOGETHER]
        try:
            yield _load(loader, some)
        except UNREADABLE:
            for index in some:
                with suppress(*UNREADABLE):
                    yield _load(loader, [index])


def _load(loader: SplitLoader, ids: Sequence[int]) -> Tensor:
    images: Tensor = loader.finish(loader.fetch(0, np.array(ids, np.int64)), 0, _CPU)["image"]
    return images


def input_warnings(splits: Mapping[str, InputStats]) -> list[str]:
    """What is suspicious: images that are not normalized, far from mean 0 and std 1, or different between splits."""
    found = []
    for split, stats in splits.items():
        mean, std = ([round(value, 3) for value in values] for values in (stats.mean, stats.std))
        if not stats.is_normalized:
            cure = f"add {{name: normalize, mean: {mean}, std: {std}}} to its transforms"
            found.append(f"data.{split}: images are not normalized ({stats}); {cure}")
        elif max(map(abs, stats.mean)) > _MAX_MEAN or not _MIN_STD < min(stats.std) <= max(stats.std) < _MAX_STD:
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
