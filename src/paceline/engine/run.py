"""A run: live objects, gathered. Whatever resumes is listed in one place, `Run.state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import Tree, load_optimizer, optimizer_tree
from paceline.checkpoint.store import Checkpoint, Store
from paceline.core.errors import CheckpointError
from paceline.core.mesh import Mesh
from paceline.core.progress import Progress
from paceline.data.loader import TrainBatches
from paceline.data.source import Source
from paceline.engine.health import FiniteCheck
from paceline.engine.parallel import SingleProcess
from paceline.engine.precision import FullPrecision
from paceline.engine.stop import StopRequest
from paceline.models.freezing import Freezing, NoFreezing
from paceline.observe.events import Observer
from paceline.observe.meters import Meters
from paceline.optim.averaging import Averaging, NoAveraging
from paceline.optim.clipping import Unclipped
from paceline.optim.plan import Plan
from paceline.optim.schedules import ChangeLog
from paceline.tasks.task import Task


@dataclass(frozen=True)
class Periods:
    """How often things are done, in steps."""

    evaluate: float
    log: float
    save: float


@dataclass(frozen=True)
class EvaluationSet:
    """A split to measure on, and how it is cut: both independent of the number of processes."""

    source: Source
    batch: int
    workers: int
    threads: int


@dataclass
class Run:
    """Everything that training needs; built by `recipe.build`, changed by `train_step` and `train`."""

    name: str
    out: Path
    seed: int
    mesh: Mesh
    task: Task
    model: nn.Module
    optimizer: Optimizer
    plan: Plan
    source: Source
    batches: TrainBatches
    evaluations: dict[str, EvaluationSet]
    progress: Progress
    periods: Periods
    store: Store
    recipe: dict[str, Any]
    """The resolved recipe, kept with every checkpoint."""
    threads: int
    clip: Callable[[Sequence[nn.Parameter]], Tensor] = field(default_factory=Unclipped)
    precision: FullPrecision = field(default_factory=FullPrecision)
    parallel: SingleProcess = field(default_factory=SingleProcess)
    freezing: Freezing | NoFreezing = field(default_factory=NoFreezing)
    averaging: Averaging = field(default_factory=NoAveraging)
    health: FiniteCheck = field(default_factory=FiniteCheck)
    observer: Observer = field(default_factory=Observer)
    stop: StopRequest = field(default_factory=StopRequest)
    meters: Meters = field(default_factory=Meters)
    """Figures that resume to the bit."""
    clock: Meters = field(default_factory=Meters)
    """Figures that depend on the machine's speed, outside that promise."""
    lr_changes: ChangeLog = field(default_factory=ChangeLog)
    pictures: bool = True
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    """The figures of the last evaluation of each split."""
    evaluated_step: int | None = None
    """The step at which they were measured; those of other weights do not count for a checkpoint."""

    def __post_init__(self) -> None:
        self.learning = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def state(self) -> Tree:
        """All that a resumed run needs beside the model."""
        return {
            "progress": self.progress.state_dict(),
            "optimizer": optimizer_tree(self.optimizer, self.model),
            "averaging": self.averaging.state_dict(),
            "meters": self.meters.state_dict(),
            "figures": self.figures,
            "threads": self.threads,
            "micro_batch": self.batches.updates.micro_batch,
            "recipe": self.recipe,
            "versions": {"torch": torch.__version__},
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same recipe, to the bit."""
        load_model(self.model, checkpoint)
        load_optimizer(self.optimizer, self.model, checkpoint.state["optimizer"])
        self.progress.load_state_dict(checkpoint.state["progress"])
        self.averaging.load_state_dict(checkpoint.state["averaging"])
        self.meters.load_state_dict(checkpoint.state["meters"])
        self.figures = checkpoint.state["figures"]
        self.freezing.apply(self.progress.step)
        # What was chosen automatically at the first start stays, whatever this machine would choose.
        self.threads = checkpoint.state["threads"]
        torch.set_num_threads(self.threads)
        micro_batch = checkpoint.state["micro_batch"]
        self.batches.updates = replace(self.batches.updates, micro_batch=micro_batch)


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights into the model it was taken from."""
    try:
        model.load_state_dict(checkpoint.model)
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit the model of this recipe: {error}") from error
