"""Training a light network on photos in files: what a run of ours gains over the usual loader and loop.

Each contestant has a process of its own, since a run settles things for its whole process; started as
`python -m benchmarks.image_training CONTESTANT CASE FOLDER`, it takes a turn for every line that it reads.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
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
from benchmarks.report import Goal, Section, at_least
from paceline.core.process import keep_freed_memory
from paceline.core.torchvision_ops import import_torchvision
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.loader import Request, load
from paceline.data.sampler import Permutation
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.geometric import RandomHorizontalFlip, RandomResizedCrop

LEAST = 1.3
_BATCH, _WORKERS = 32, 2
_OURS, _PILLOW = "Paceline", "Pillow + torchvision v2, DataLoader"


class Case(NamedTuple):
    """A network to train for some steps a turn."""

    name: str
    model: str
    steps: int

    def make_model(self) -> nn.Module:
        """The network, with weights that are drawn."""
        import_torchvision()
        import torchvision.models

        torch.manual_seed(0)
        model: nn.Module = getattr(torchvision.models, self.model)(num_classes=2).train()
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


CASES = (Case("MobileNetV2", "mobilenet_v2", 4), Case("ShuffleNetV2 × 0.5", "shufflenet_v2_x0_5", 10))

Pairs = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Gives the images and labels of another epoch each time it is called, as many as are wanted."""


def ours(root: Path, steps: int) -> Pairs:
    """Paceline's loader and transforms."""
    dataset = ImageFolder(root)
    source = SplitLoader(dataset, [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)], seed=0)
    order, numbers, device = Permutation(len(dataset), seed=0), count(), torch.device("cpu")

    def some() -> Iterator[tuple[Tensor, Tensor]]:
        epoch = next(numbers)
        requests = (Request(epoch, order.at(epoch, k * _BATCH, (k + 1) * _BATCH)) for k in range(steps))
        with closing(load(source, requests, _WORKERS, "thread")) as batches:  # type: ignore[type-var]
            for fetched in batches:
                batch = source.transform_batch(fetched, epoch, device)
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

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def turn(self) -> dict[str, float]:
        """Seconds an image, and the share of them that was spent waiting."""
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
        return {"seconds": seconds / images_seen, "waiting": waited / seconds}


@dataclass
class Contestant:
    """A contestant's process, seen from outside."""

    process: subprocess.Popen[str]
    waits: list[float] = field(default_factory=list)

    def turn(self) -> float:
        """Seconds an image."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("turn", file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        self.waits.append(answer["waiting"])
        return float(answer["seconds"])


@contextmanager
def started(name: str, number: int, root: Path) -> Iterator[Contestant]:
    """The process of a contestant."""
    command = [sys.executable, "-m", "benchmarks.image_training", name, str(number), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Contestant(process)
        assert process.stdin is not None
        process.stdin.close()


def measure(is_quick: bool) -> Section:
    """Images a second with either loader, and the share of the time that went by waiting for data."""
    rounds = 3 if is_quick else 7
    photos = Photos()
    with ExitStack() as stack:
        contestants = {
            f"{case.name}: {name}": stack.enter_context(started(name, number, photos.root))
            for number, case in enumerate(CASES)
            for name in (_OURS, _PILLOW)
        }
        turns: dict[str, Turn] = {name: contestant.turn for name, contestant in contestants.items()}
        measured = interleave(turns, rounds)
    return Section(
        "Training on photos from files",
        f"{photos.described}: random-resized crop to {SIZE}, flip, normalize, batch size {_BATCH}; forward, backward"
        f" and SGD in channels_last on {torch.get_num_threads()} threads, {rounds} rounds of 4 or 10 steps, with"
        f" {_WORKERS} loader threads or workers. Each contestant has its own process; Paceline's keeps freed memory, as"
        " in a run on a CPU. Waiting includes batch transforms, which only Paceline has.",
        ["network and loader", "images/s", "waiting for data", "Paceline is faster by", "middle half"],
        [_row(each, contestants[each.name], measured) for each in measured.values()],
        [_goal(measured)],
    )


def _row(each: Measured, contestant: Contestant, measured: dict[str, Measured]) -> list[str]:
    ratios = each.ratios(measured[f"{each.name.split(':')[0]}: {_OURS}"])
    waiting = statistics.median(contestant.waits[1:])
    return [
        each.name,
        f"{1 / each.median:,.1f}",
        f"{waiting:.0%}",
        f"{statistics.median(ratios):.2f} ×",
        spread(ratios),
    ]


def _goal(measured: dict[str, Measured]) -> Goal:
    net = CASES[0].name
    factor = statistics.median(measured[f"{net}: {_PILLOW}"].ratios(measured[f"{net}: {_OURS}"]))
    return at_least(f"{net}: faster than the same with {_PILLOW}", factor, LEAST)


def main(name: str, number: str, root: str) -> None:
    """Be a contestant."""
    case = CASES[int(number)]
    if name == _OURS:
        keep_freed_memory()
    prepare = ours if name == _OURS else pillow
    training = Training(prepare(Path(root), case.steps), case.make_model())
    for _ in sys.stdin:
        print(json.dumps(training.turn()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
