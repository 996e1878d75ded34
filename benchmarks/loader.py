"""How fast samples that lie in memory come as augmented batches."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.contest import MEAN, STD, Pair
from benchmarks.measuring import Measured, Turn, interleave, spread
from benchmarks.report import Goal, Section, at_least
from paceline.core.torchvision_ops import import_torchvision
from paceline.data.datasets.idx import fashion_small
from paceline.data.sampler import Permutation
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.geometric import RandomCrop, RandomHorizontalFlip

LEAST = 20
_BATCH, _PADDING, _WORKERS = 128, 2, 2
_OURS = "Paceline, in memory"


class Samples(Dataset[Pair]):
    """The same data set, sample by sample."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        data = fashion_small("train")
        self.images, self.labels = data.images, data.fields["label"]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Pair:
        return self.transform(self.images[index]), self.labels[index]


def plain_transform(image: Tensor) -> Tensor:
    """Crop, flip and normalize one image with as few calls as that takes."""
    top, left, flip = random.randrange(2 * _PADDING + 1), random.randrange(2 * _PADDING + 1), random.random() < 0.5
    height, width = image.shape[1:]
    cropped = F.pad(image, (_PADDING,) * 4)[:, top : top + height, left : left + width]
    chosen = cropped.flip(-1) if flip else cropped
    return chosen.float().mul_(1 / (255 * STD)).add_(-MEAN / STD)


def torchvision_transform() -> Callable[[Tensor], Tensor]:
    """The same with torchvision's transforms, as its documentation puts them together."""
    import_torchvision()
    from torchvision.transforms import v2

    composed: Callable[[Tensor], Tensor] = v2.Compose(
        [
            v2.RandomCrop(28, padding=_PADDING),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([MEAN], [STD]),
        ]
    )
    return composed


def measure(is_quick: bool) -> Section:
    """Samples a second, beside torch's loader."""
    torch.set_num_threads(1)
    rounds = 3 if is_quick else 11
    turns: dict[str, Turn] = {_OURS: in_memory()}
    for name, transform in (("plain tensor code", plain_transform), ("torchvision v2", torchvision_transform())):
        for workers in (0, _WORKERS):
            turns[f"DataLoader, {workers} workers, {name}"] = by_sample(transform, workers)
    measured = interleave(turns, rounds)
    ours = measured[_OURS]
    return Section(
        "Loading from memory",
        f"The embedded Fashion-MNIST subset (uint8 [6000, 1, 28, 28]): random crop with padding {_PADDING}, flip,"
        f" normalize, batch size {_BATCH}; one thread per process; {rounds} rounds of whole epochs, persistent workers."
        " The goal is relative to plain tensor code, the faster way to write the transforms. torchvision's transforms"
        " are shown because people use them.",
        ["loader", "samples/s", "Paceline is faster by", "middle half"],
        [
            [
                each.name,
                f"{1 / each.median:,.0f}",
                f"{statistics.median(each.ratios(ours)):.1f} ×",
                spread(each.ratios(ours)),
            ]
            for each in measured.values()
        ],
        [_goal(name, measured, ours) for name in ("torchvision v2", "plain tensor code")],
    )


def _goal(name: str, measured: Mapping[str, Measured], ours: Measured) -> Goal:
    """How much faster than the better DataLoader, with or without workers, with the transforms written so."""
    best = min((each for each in measured.values() if each.name.endswith(name)), key=lambda each: each.median)
    factor = statistics.median(best.ratios(ours))
    return at_least(f"faster than the better DataLoader with {name}", factor, LEAST, "{:.1f} ×")


def in_memory() -> Turn:
    """Whole batches: order, gathering and the transforms."""
    source = SplitLoader(
        fashion_small("train"), [RandomCrop(28, _PADDING), RandomHorizontalFlip(), Normalize([MEAN], [STD])], seed=0
    )
    size, device = len(source.dataset), torch.device("cpu")
    order, epochs = Permutation(size, seed=0), 5

    def take() -> float:
        begin = perf_counter()
        for epoch in range(epochs):
            for start in range(0, size, _BATCH):
                ids = order.at(epoch, start, min(start + _BATCH, size))
                source.transform_batch(source.fetch(epoch, ids), epoch, device)
        return (perf_counter() - begin) / (size * epochs)

    return take


def by_sample(transform: Callable[[Tensor], Tensor], workers: int) -> Turn:
    """Torch's loader over single samples."""
    samples = Samples(transform)
    loader = DataLoader(samples, _BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)

    def take() -> float:
        begin = perf_counter()
        for _ in loader:
            pass
        return (perf_counter() - begin) / len(samples)

    return take
