"""Training a light network on photos in files: what loading costs it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring import Measured, Turn, interleave, spread
from benchmarks.photos import MEAN, SIZE, STD, Photos, pillow_loader
from benchmarks.report import Goal, Section
from paceline.data.allocation import keep_freed_memory
from paceline.data.batch_transforms import Flip, Normalize
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.loader import Request, load
from paceline.data.sample_transforms import RandomResizedCrop
from paceline.data.sampler import Order
from paceline.data.source import Source
from paceline.models.torchvision_ops import import_torchvision

LEAST = 1.3
_BATCH, _WORKERS = 32, 2
_OURS, _PILLOW = "Paceline", "Pillow + torchvision v2, DataLoader"


class Case(NamedTuple):
    """A network to train for some steps a turn, wholly or only its classifier."""

    name: str
    model: str
    steps: int
    is_frozen: bool = False

    def make_model(self) -> nn.Module:
        """The network, with weights that are drawn."""
        import_torchvision()
        import torchvision.models

        torch.manual_seed(0)
        model: nn.Module = getattr(torchvision.models, self.model)(num_classes=2).train()
        if self.is_frozen:
            model.requires_grad_(False).eval()
            next(child for child in reversed(list(model.modules())) if isinstance(child, nn.Linear)).requires_grad_()
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


CASES = (
    Case("MobileNetV2", "mobilenet_v2", 4),
    Case("ShuffleNetV2 × 0.5", "shufflenet_v2_x0_5", 10),
    Case("ShuffleNetV2 × 0.5, its classifier only", "shufflenet_v2_x0_5", 20, is_frozen=True),
)

Pairs = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Gives the images and labels of another epoch each time it is called, as many as are wanted."""


def ours(root: Path, steps: int) -> Pairs:
    """Paceline's loader and transforms."""
    dataset = ImageFolder(root)
    source = Source(dataset, [RandomResizedCrop(SIZE), Flip(), Normalize(MEAN, STD)], seed=0)
    order, numbers, device = Order(len(dataset), seed=0), count(), torch.device("cpu")

    def some() -> Iterator[tuple[Tensor, Tensor]]:
        epoch = next(numbers)
        requests = (Request(epoch, order.at(epoch, k * _BATCH, (k + 1) * _BATCH)) for k in range(steps))
        with closing(load(source, requests, _WORKERS, "thread")) as batches:  # type: ignore[type-var]
            for fetched in batches:
                batch = source.finish(fetched, epoch, device)
                yield batch["image"], batch["label"]

    return some


def pillow(root: Path, steps: int) -> Pairs:
    """What people have without Paceline."""
    loader = pillow_loader(root, _BATCH, _WORKERS, steps * _BATCH)
    return lambda: iter(loader)


@dataclass
class Training:
    """Some steps of SGD a turn, with what was waited for data."""

    pairs: Pairs
    model: nn.Module
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def turn(self) -> float:
        """Seconds an image."""
        begin = waiting = perf_counter()
        waited, images_seen = 0.0, 0
        for images, labels in self.pairs():
            waited += perf_counter() - waiting
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images.contiguous(memory_format=torch.channels_last)), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            images_seen += len(images)
            waiting = perf_counter()
        seconds = perf_counter() - begin
        self.waits.append(waited / seconds)
        return seconds / images_seen


def measure(is_quick: bool) -> Section:
    """Images a second with either loader, and the share of the time that went by waiting for data."""
    keep_freed_memory()
    rounds = 3 if is_quick else 9
    photos = Photos()
    trainings = {
        f"{case.name}: {name}": Training(prepare(photos.root, case.steps), case.make_model())
        for case in CASES
        for name, prepare in ((_OURS, ours), (_PILLOW, pillow))
    }
    turns: dict[str, Turn] = {name: training.turn for name, training in trainings.items()}
    measured = interleave(turns, rounds)
    return Section(
        "Training on photos from files",
        f"{photos.described}: random-resized crop to {SIZE}, flip, normalise, batches of {_BATCH}; forward, backward"
        f" and SGD in the channels_last layout, {rounds} rounds of 4 to 20 steps; {_WORKERS} threads or workers load."
        " Waiting includes the transforms of whole batches, which only Paceline has. The heavier the network, the less"
        " loading matters on a processor, which does both.",
        ["network and loader", "images/s", "waiting for data", "Paceline is faster by", "middle half"],
        [_row(each, trainings[each.name], measured) for each in measured.values()],
        [_goal(measured)],
    )


def _row(each: Measured, training: Training, measured: dict[str, Measured]) -> list[str]:
    ratios = each.ratios(measured[f"{each.name.split(':')[0]}: {_OURS}"])
    waiting = statistics.median(training.waits[1:])
    return [
        each.name,
        f"{1 / each.median:,.1f}",
        f"{waiting:.0%}",
        f"{statistics.median(ratios):.2f} ×",
        spread(ratios),
    ]


def _goal(measured: dict[str, Measured]) -> Goal:
    net = CASES[-1].name
    factor = statistics.median(measured[f"{net}: {_PILLOW}"].ratios(measured[f"{net}: {_OURS}"]))
    return Goal(f"{net}: at least {LEAST} × the same with {_PILLOW}", f"{factor:.2f} ×", factor >= LEAST)
