"""A run: live objects, gathered. Whatever resumes is listed in one place, `Run.state`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.background import NoSaver, Saver
from paceline.checkpoint.shards import Part
from paceline.checkpoint.state import Stateful, Tree, load_optimizer, optimizer_tree
from paceline.checkpoint.store import Checkpoint, Store
from paceline.core.errors import CheckpointError
from paceline.core.mesh import Mesh
from paceline.core.progress import Progress
from paceline.data.loading.loader import TrainBatches
from paceline.data.loading.source import Source
from paceline.engine.health import FiniteCheck
from paceline.engine.heartbeat import Heartbeat, NoHeartbeat
from paceline.engine.kept_buffers import KeptBuffers, NotKept
from paceline.engine.parallel import SingleProcess
from paceline.engine.precision import FullPrecision, Precision
from paceline.engine.stop import StopRequest
from paceline.models.freezing import Freezing, NoFreezing
from paceline.observe.events import Observer
from paceline.observe.meters import Meters
from paceline.optim.averaging import Averaging, NoAveraging
from paceline.optim.clipping import Unclipped
from paceline.optim.plan import Plan
from paceline.optim.schedules import ChangeLog
from paceline.tasks.task import Task

if TYPE_CHECKING:
    from paceline.engine.step import StepResult


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
    masters: nn.Module
    """The model with the weights that the optimizer holds; itself, unless it computes with rounded copies."""
    parallel: SingleProcess
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
    precision: Precision = field(default_factory=FullPrecision)
    freezing: Freezing | NoFreezing = field(default_factory=NoFreezing)
    averaging: Averaging = field(default_factory=NoAveraging)
    health: FiniteCheck = field(default_factory=FiniteCheck)
    parts: dict[str, Stateful] = field(default_factory=dict)
    """Losses, the task and whatever else remembers something, by name: it is saved and resumed with the run."""
    buffers: KeptBuffers | NotKept = field(default_factory=NotKept)
    heartbeat: Heartbeat | NoHeartbeat = field(default_factory=NoHeartbeat)
    observer: Observer = field(default_factory=Observer)
    stop: StopRequest = field(default_factory=StopRequest)
    meters: Meters = field(default_factory=Meters)
    """Figures that resume to the bit."""
    clock: Meters = field(default_factory=Meters)
    """Figures that depend on the machine's speed, outside that promise."""
    lr_changes: ChangeLog = field(default_factory=ChangeLog)
    pictures: bool = True
    save_predictions: bool = False
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    """The figures of the last evaluation of each split."""
    evaluated_step: int | None = None
    """The step at which they were measured; those of other weights do not count for a checkpoint."""

    forward_seconds: float = 0.0
    """What this process took for the forward passes of the update so far."""
    unread: list[StepResult] = field(default_factory=list)
    """Updates whose figures are not among the meters yet."""

    def __post_init__(self) -> None:
        self.saver = self._make_saver()
        self.learning = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _make_saver(self) -> Saver | NoSaver:
        """Where every process holds everything the first one writes, else each its part."""
        if self.parallel.passes == "even":
            token = self.mesh.start_sum([float(secrets.randbits(50)) if self.mesh.is_main else 0.0])()[0]
            return Saver(self.store, self.mesh.rank, self.mesh.world, f"{token:.0f}")
        return Saver(self.store) if self.mesh.is_main else NoSaver(self.store)

    def unfreeze(self, step: int) -> None:
        """Have those parameters learn that begin to with this step."""
        self.freezing.apply(step)
        self.parallel.rewrap()

    def model_state(self) -> dict[str, Tensor]:
        """The model's weights and buffers, all of them; every process asks for them at the same time."""
        self.parallel.share_buffers()
        return {name: self.parallel.whole(tensor) for name, tensor in self.masters.state_dict().items()}

    def saved_model(self) -> dict[str, Tensor | Part]:
        """The same as this process writes it into a checkpoint."""
        self.parallel.share_buffers()
        return {name: self.parallel.part(tensor) for name, tensor in self.masters.state_dict().items()}

    def lasting(self) -> list[Tensor]:
        """What only the optimizer and the average change: copying it for a checkpoint can wait until they do."""
        found: list[Tensor] = list(self.masters.parameters())
        found += [value for state in self.optimizer.state.values() for value in state.values() if _is_lasting(value)]
        found += self.averaging.state_dict().get("average", {}).values()
        parts = [self.parallel.part(tensor) for tensor in found]
        return [part.tensor if isinstance(part, Part) else part for part in parts]

    def state(self) -> Tree:
        """All that a resumed run needs beside the model, as this process writes it into a checkpoint."""
        optimizer = optimizer_tree(self.optimizer, self.masters)
        averaging = self.averaging.state_dict()
        return {
            "progress": self.progress.state_dict(),
            "optimizer": {**optimizer, "state": _mapped(optimizer["state"], self.parallel.part)},
            "averaging": _mapped(averaging, self.parallel.part),
            "precision": self.precision.state_dict(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "meters": self.meters.state_dict(),
            "figures": self.figures,
            "threads": self.threads,
            "micro_batch": self.batches.updates.micro_batch,
            "world": self.mesh.world,
            "recipe": self.recipe,
            "versions": {"torch": torch.__version__},
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same recipe, to the bit."""
        state, place = checkpoint.state, self.parallel.place
        shapes = dict(self.masters.named_parameters())
        self.load_model(checkpoint)
        optimizer = state["optimizer"]
        parts = {
            name: {key: place(value, shapes[name]) if isinstance(value, Tensor) else value for key, value in of.items()}
            for name, of in optimizer["state"].items()
            if name in shapes
        }
        load_optimizer(self.optimizer, self.masters, {**optimizer, "state": parts})
        self.progress.load_state_dict(state["progress"])
        self.load_average(checkpoint)
        self.precision.load_state_dict(state["precision"])
        for name, part in self.parts.items():
            if name in state.get("parts", {}):
                part.load_state_dict(state["parts"][name])
        self.meters.load_state_dict(state["meters"])
        self.figures = state["figures"]
        self.freezing.apply(self.progress.step)
        self.parallel.rewrap()
        self._keep_choices(state)

    def load_model(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint's weights into the model it was taken from."""
        own = self.masters.state_dict()
        given = {
            name: self.parallel.place(tensor, own[name]) if name in own else tensor
            for name, tensor in checkpoint.model.items()
        }
        try:
            self.masters.load_state_dict(given)
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint.path} does not fit the model of this recipe: {error}") from error
        self.precision.publish()

    def load_average(self, checkpoint: Checkpoint) -> None:
        """Take over the average of the weights, if there is one."""
        state, shapes = checkpoint.state["averaging"], dict(self.masters.named_parameters())
        average = {
            name: self.parallel.place(tensor, shapes[name]) if name in shapes else tensor
            for name, tensor in state.get("average", {}).items()
        }
        self.averaging.load_state_dict({**state, "average": average} if average else state)

    def _keep_choices(self, state: Tree) -> None:
        """What was chosen automatically at the first start stays, whatever this machine would choose."""
        if state["world"] == self.mesh.world or self.parallel.name == "ordered":
            self.threads = state["threads"]
            torch.set_num_threads(self.threads)
            self.batches.updates = replace(self.batches.updates, micro_batch=state["micro_batch"])


def _is_lasting(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _mapped(tree: Tree, function: Callable[[Tensor], Tensor | Part]) -> Tree:
    """The tree with every tensor replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(value, function) for value in tree]
    return tree
