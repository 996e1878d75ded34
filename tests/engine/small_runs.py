"""Runs made by hand from plain objects, small enough to be checked against whole-batch arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.store import Store
from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.data.batch import Batch, Sample
from paceline.data.datasets.idx import MemoryImages
from paceline.data.loader import TrainBatches
from paceline.data.sampler import BatchSampler
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.base import BatchTransform
from paceline.engine.replay import explain_nonfinite
from paceline.engine.run import EvaluationSet, Intervals, Run
from paceline.engine.state import Choices, RunState
from paceline.engine.strategies.single import SingleStrategy
from paceline.losses.classification import CrossEntropy
from paceline.losses.loss_term import Loss, LossTerm
from paceline.optim.lr_scheduler import Schedule, Scheduler
from paceline.tasks.classification import Classification

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, CPU)
STATE = {each.name for each in fields(RunState)} - {"model"}
NUM_CLASSES = 3
CLASSES = [f"class {number}" for number in range(NUM_CLASSES)]


class SoftDice:
    """1 − 2·Σ p·y / Σ (p + y), over all pairs of sample and class: its denominator contains predictions."""

    def count(self, batch: Batch) -> None:
        return None

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        truth = nn.functional.one_hot(batch["label"], outputs.shape[1]).to(outputs.dtype)
        shares = outputs.sigmoid()
        overlap, both = (shares * truth).sum(), (shares + truth).sum()
        return LossTerm(both - 2 * overlap, both)


class Remembering(SoftDice):
    """Dice of sharpened outputs; it remembers how large outputs were so far, and how often it saw each sample."""

    def __init__(self, size: int) -> None:
        self.heat = torch.ones((), dtype=torch.float64)
        self.seen = torch.zeros(size, dtype=torch.int64)

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        self.heat = 0.9 * self.heat + 0.1 * outputs.detach().abs().mean()
        self.seen[batch.ids] += 1
        return super().__call__(outputs / self.heat, batch)

    def state_dict(self) -> dict[str, Tensor]:
        return {"heat": self.heat, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.heat, self.seen = state["heat"], state["seen"]


class Net(nn.Module):
    """Layers, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, 2, 6, 6]."""
        logits: Tensor = self.layers(images)
        return logits


class PlainNet(Net):
    """No normalization over samples: a whole batch and its parts have the same gradients."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(80, NUM_CLASSES))


class NormedNet(Net):
    """With BatchNorm, whose unit is the micro-batch, and dropout, whose seed is that of the micro-batch."""

    def __init__(self) -> None:
        convolution, norm = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5)
        head = nn.Dropout(0.3), nn.Linear(80, NUM_CLASSES)
        super().__init__(convolution, norm, nn.ReLU(), nn.Flatten(), *head)


class NamedFiles:
    """A data set that has names and nothing else."""

    classes = ["foreground"]
    channels = 3

    def __init__(self, *names: str) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def path(self, index: int) -> Path:
        return Path("/set/images") / self._names[index]

    def read(self, index: int) -> Sample:
        raise AssertionError("names are known without reading a sample")


def images(size: int, dtype: torch.dtype = torch.float64) -> MemoryImages:
    """Noise with labels that a net can learn something about."""
    generator = torch.Generator().manual_seed(size)
    labels = torch.randint(0, NUM_CLASSES, (size,), generator=generator)
    pixels = torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)
    pixels[:, 0] += labels.view(-1, 1, 1) * 0.7
    return MemoryImages(pixels.to(dtype), {"label": labels}, CLASSES)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters that learn as one group, as a plan wants it."""
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad], "lr_scale": 1.0}]


def solver(optimizer: Optimizer, lr: float, steps: int) -> dict[str, Any]:
    """The parts of a run that learn, at a learning rate that stays."""
    schedule = Schedule(lr, lambda done: 1.0, total_steps=steps, steps_per_epoch=1)
    return {"optimizer": optimizer, "scheduler": Scheduler(optimizer, schedule)}


def with_solver(run: Run, optimizer: Optimizer, lr: float) -> Run:
    """The same run with another optimizer, before its first step."""
    parts = solver(optimizer, lr, run.progress.total_steps)
    return replace(run, state=replace(run.state, optimizer=optimizer), scheduler=parts["scheduler"])


@dataclass(frozen=True)
class Small:
    """What a small run is made of; `run` makes it live."""

    out: Path
    size: int = 64
    batch: int = 64
    micro_batch_size: int = 64
    steps: int = 4
    losses: Mapping[str, tuple[Loss, float]] | None = None
    net: type[nn.Module] = PlainNet
    dtype: torch.dtype = torch.float64
    lr: float = 0.1
    transforms: Sequence[BatchTransform] = ()
    evaluation_size: int = 0
    evaluation_batch: int = 16
    evaluation_workers: int = 0
    every: tuple[float, float, float] = (2, 1, 2)
    world: int = 1
    rank: int = 0

    def run(self, **parts: Any) -> Run:
        """The run; `parts` replace fields of it."""
        torch.manual_seed(0)
        model = self.net().to(self.dtype)
        losses = self.losses or {"cross_entropy": (CrossEntropy(), 1.0)}
        data = images(self.size, self.dtype)
        loader = SplitLoader(data, list(self.transforms), seed=7, float_type=self.dtype)
        updates = BatchSampler(self.size, self.batch, self.micro_batch_size)
        progress = Progress(self.steps, updates.steps_per_epoch)
        world = World(self.rank, self.world, self.rank, CPU)
        made: dict[str, Any] = {
            "name": "small",
            "out": self.out,
            "seed": 7,
            "world": world,
            "task": Classification(
                {name: loss for name, (loss, _) in losses.items()},
                {name: weight for name, (_, weight) in losses.items()},
                CLASSES,
                top_k=(1,),
            ),
            "model": model,
            **solver(torch.optim.SGD(grouped(model), lr=self.lr), self.lr, self.steps),
            "train_loader": loader,
            "batches": TrainBatches(loader, updates, world, progress, workers=0),
            "evaluations": self.evaluations(),
            "progress": progress,
            "intervals": Intervals(*self.every),
            "store": Store(self.out / "checkpoints"),
            "choices": Choices(torch.get_num_threads(), self.micro_batch_size, self.world, channels_last=False),
            "visualize": False,
            "explain_nonfinite": explain_nonfinite,
        }
        chosen = {**made, **parts}
        chosen.setdefault("strategy", SingleStrategy(chosen["model"]))
        of_state = {name: chosen.pop(name) for name in list(chosen) if name in STATE}
        return Run(state=RunState(model=chosen["model"], **of_state), **chosen)

    def evaluations(self) -> dict[str, EvaluationSet]:
        """A validation split, if it has a size."""
        if not self.evaluation_size:
            return {}
        loader = SplitLoader(images(self.evaluation_size, self.dtype), [], seed=7, float_type=self.dtype)
        return {"val": EvaluationSet(loader, self.evaluation_batch, self.evaluation_workers, threads=1)}


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Operations use one thread: for such small ones more only wait for each other."""
    with threads(1):
        yield


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Have operations use so many threads, and put the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
