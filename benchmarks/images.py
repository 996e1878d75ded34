"""How fast photos in files come as augmented batches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import images_dali, images_packed
from benchmarks.measuring import Measured, Turn, interleave, spread
from benchmarks.photos import MEAN, SIZE, STD, Photos, pillow_loader
from benchmarks.report import Goal, Section, at_least
from paceline.core.errors import missing_extra
from paceline.core.process import keep_freed_memory
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.loader import Kind, Request, load
from paceline.data.sampler import Permutation
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.geometric import RandomHorizontalFlip, RandomResizedCrop

BATCH, WORKERS = 64, 2
OURS, PACKED = "Paceline, automatic", f"Paceline from a pack, {WORKERS} threads"
PILLOW = f"Pillow + torchvision v2, DataLoader with {WORKERS} workers"
_REST = 0.3  # seconds between two turns: DALI goes on to read ahead when its turn is over
DALI = f"DALI on the host, {WORKERS} threads"

Epochs = Callable[[], Iterator[Tensor]]
"""Gives, each time it is called, the normalized batches of one more epoch."""


class Aim(NamedTuple):
    """One contestant is to be so many times as fast as another."""

    fast: str
    slow: str
    least: float


AIMS = [Aim(OURS, PILLOW, 2.0), Aim(OURS, DALI, 1.1), Aim(PACKED, PILLOW, 6.0)]


def ours(root: Path, kind: Kind, workers: int | None) -> Epochs:
    """Paceline: order, reading, the transforms of samples, and those of batches."""
    dataset = ImageFolder(root)
    source = SplitLoader(dataset, [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)], seed=0)
    order, numbers, device = Permutation(len(dataset), seed=0), count(), torch.device("cpu")

    def epoch() -> Iterator[Tensor]:
        number = next(numbers)
        with closing(load(source, _requests(order, number), workers, kind)) as batches:  # type: ignore[type-var]
            for batch in batches:
                yield source.transform_batch(batch, number, device)["image"]

    return epoch


def _requests(order: Permutation, epoch: int) -> Iterator[Request]:
    for start in range(0, order.size, BATCH):
        yield Request(epoch, order.at(epoch, start, min(start + BATCH, order.size)))


def pillow(root: Path) -> Epochs:
    """What people have without Paceline."""
    loader = pillow_loader(root, BATCH, WORKERS)
    return lambda: (images for images, _ in loader)


def contestants() -> dict[str, Callable[[Path], Epochs]]:
    """Who takes part, the reference first."""
    named: dict[str, Callable[[Path], Epochs]] = {
        OURS: lambda root: ours(root, "auto", None),
        f"Paceline, {WORKERS} threads": lambda root: ours(root, "thread", WORKERS),
        f"Paceline, {WORKERS} processes": lambda root: ours(root, "process", WORKERS),
        PACKED: lambda root: images_packed.epochs(root, BATCH),
        PILLOW: pillow,
    }
    if not missing_extra("dali"):
        named[DALI] = lambda root: images_dali.epochs(root, BATCH)
    return named


def measure(is_quick: bool) -> Section:
    """Images a second, beside other ways to load the same."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    rounds = 3 if is_quick else 11
    photos = Photos()
    measured = interleave({name: _turn(prepare(photos.root)) for name, prepare in contestants().items()}, rounds)
    return Section(
        "Loading photos from files",
        f"{photos.described}: random-resized crop to {SIZE}, flip, normalize, batch size {BATCH}; {rounds} rounds of"
        " whole epochs. Files are in the system's cache. DataLoader and DALI keep their workers between rounds;"
        " Paceline starts its threads and processes again.",
        ["loader", "images/s", "Paceline is faster by", "middle half"],
        [_row(each, measured[OURS]) for each in measured.values()],
        [_goal(aim, measured) for aim in AIMS if aim.slow in measured],
    )


def _turn(epochs: Epochs) -> Turn:
    def take() -> float:
        sleep(_REST)
        begin = perf_counter()
        number = sum(len(images) for images in epochs())
        return (perf_counter() - begin) / number

    return take


def _row(each: Measured, reference: Measured) -> list[str]:
    ratios = each.ratios(reference)
    return [each.name, f"{1 / each.median:,.0f}", f"{statistics.median(ratios):.2f} ×", spread(ratios)]


def _goal(aim: Aim, measured: Mapping[str, Measured]) -> Goal:
    factor = statistics.median(measured[aim.slow].ratios(measured[aim.fast]))
    return at_least(f"{aim.fast}: faster than {aim.slow}", factor, aim.least)
