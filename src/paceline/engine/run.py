"""A run: live objects, gathered. Whatever resumes is listed in one place, `Run.state`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.shards import Part
from paceline.checkpoint.state import Stateful, Tree, load_optimizer, optimizer_tree
from paceline.checkpoint.store import Checkpoint, Store
from paceline.checkpoint.writer import NoSaver, Saver
from paceline.core.errors import CheckpointError
from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.data.loader import StepBatch, TrainBatches
from paceline.data.split_loader import SplitLoader
from paceline.engine.finite_check import FiniteCheck, KeptBuffers, NotKept
from paceline.engine.loss_accumulator import LossAccumulator
from paceline.engine.precision.base import FullPrecision, Precision
from paceline.engine.saved_state import check_state, restoring
from paceline.engine.stateful import load_state
from paceline.engine.stop import StopRequest
from paceline.engine.strategies.ddp import SingleStrategy
from paceline.engine.watchdog import Heartbeat, NoHeartbeat
from paceline.loggers.events import LoggerGroup, Note
from paceline.loggers.meters import Meters
from paceline.models.freezing import Freezing, NoFreezing
from paceline.optim.averaging import Averaging, NoAveraging
from paceline.optim.clipping import Unclipped
from paceline.optim.scheduler import Scheduler
from paceline.optim.schedules import ChangeLog
from paceline.tasks.task import Task


class StepResult(NamedTuple):
    """What a step did. Losses and norm are tensors that nobody has read yet."""

    accumulator: LossAccumulator
    grad_norm: Tensor
    lr: float
    should_stop: bool
    """Whether any rank was asked to stop; all ranks agree."""
    skipped: bool = False
    """Whether the weights were left unchanged, since the gradient was not finite."""

    @property
    def losses(self) -> dict[str, Tensor]:
        """The weighted sum as "loss", then each loss by name: this rank's share of them."""
        return self.accumulator.own()


@dataclass(frozen=True)
class Intervals:
    """How often things are done, in steps."""

    evaluate: float
    log: float
    save: float


@dataclass(frozen=True)
class EvaluationSet:
    """A split to measure on, and how it is cut: both independent of the number of processes."""

    source: SplitLoader
    batch: int
    workers: int
    threads: int


@dataclass
class Run:
    """Everything that training needs; built by `recipe.build`, changed by `train_step` and `train`."""

    name: str
    out: Path
    seed: int
    world: World
    task: Task
    model: nn.Module
    master_model: nn.Module
    """The model with the weights that the optimizer holds; itself, unless it computes with rounded copies."""
    strategy: SingleStrategy
    optimizer: Optimizer
    scheduler: Scheduler
    source: SplitLoader
    batches: TrainBatches
    evaluations: dict[str, EvaluationSet]
    progress: Progress
    intervals: Intervals
    store: Store
    recipe: dict[str, Any]
    """The resolved recipe, kept with every checkpoint."""
    threads: int
    clip: Callable[[Sequence[nn.Parameter]], Tensor] = field(default_factory=Unclipped)
    precision: Precision = field(default_factory=FullPrecision)
    freezing: Freezing | NoFreezing = field(default_factory=NoFreezing)
    averaging: Averaging = field(default_factory=NoAveraging)
    finite_check: FiniteCheck = field(default_factory=FiniteCheck)
    explain_nonfinite: Callable[[Run, StepBatch], str] = lambda run, step_batch: "cause unknown"
    """Names the module and the samples behind a non-finite gradient."""
    parts: dict[str, Stateful] = field(default_factory=dict)
    """Losses, the task and whatever else remembers something, by name: it is saved and resumed with the run."""
    buffers: KeptBuffers | NotKept = field(default_factory=NotKept)
    heartbeat: Heartbeat | NoHeartbeat = field(default_factory=NoHeartbeat)
    logger: LoggerGroup = field(default_factory=LoggerGroup)
    stop: StopRequest = field(default_factory=StopRequest)
    meters: Meters = field(default_factory=Meters)
    """Metrics that resume to the bit."""
    clock: Meters = field(default_factory=Meters)
    """Metrics that depend on the machine's speed, outside that promise."""
    lr_changes: ChangeLog = field(default_factory=ChangeLog)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What identifies the data of each split, kept with every checkpoint; see `data.fingerprint`."""
    visualize: bool = True
    save_predictions: bool = False
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """The metrics of the last evaluation of each split."""
    evaluated_step: int | None = None
    """The step at which those of the validation split were measured; those of other weights do not count for a
    checkpoint."""
    pending: list[str] = field(default_factory=list)
    """What is due at the present step and not done yet, in order; a checkpoint keeps what is left when it is saved."""

    forward_seconds: float = 0.0
    """What this process took for the forward passes of the step so far."""
    unread: list[StepResult] = field(default_factory=list)
    """Updates whose metrics are not among the meters yet."""

    def __post_init__(self) -> None:
        self.strategy.parts = self.parts
        self.saver = self._make_saver()
        self.trainable = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _make_saver(self) -> Saver | NoSaver:
        """Where every process holds everything the first one writes, else each its part."""
        if self.strategy.passes == "even":
            token = self.world.start_sum([float(secrets.randbits(50)) if self.world.is_main else 0.0])()[0]
            return Saver(self.store, self.world.rank, self.world.size, f"{token:.0f}")
        return Saver(self.store) if self.world.is_main else NoSaver(self.store)

    def accepts(self, step_batch: StepBatch, grad_norm: Tensor) -> bool:
        """Whether the optimizer may step with this gradient."""
        return self.finite_check.accepts(
            grad_norm,
            step_batch.step,
            explain=lambda: self.explain_nonfinite(self, step_batch),
            warn=lambda text: self.logger.emit(Note(text, "warning")),
        )

    def unfreeze(self, step: int) -> None:
        """Have those parameters learn that begin to with this step."""
        self.freezing.apply(step)
        self.strategy.rewrap()

    def model_state(self) -> dict[str, Tensor]:
        """The model's weights and buffers, all of them; every process asks for them at the same time."""
        self.strategy.share_buffers()
        return {name: self.strategy.whole(tensor) for name, tensor in self.master_model.state_dict().items()}

    def saved_model(self) -> dict[str, Tensor | Part]:
        """The same as this process writes it into a checkpoint."""
        self.strategy.share_buffers()
        return {name: self.strategy.part(tensor) for name, tensor in self.master_model.state_dict().items()}

    def lasting(self) -> list[Tensor]:
        """What only the optimizer and the average change: copying it for a checkpoint can wait until they do."""
        found: list[Tensor] = list(self.master_model.parameters())
        found += [value for state in self.optimizer.state.values() for value in state.values() if _is_lasting(value)]
        found += self.averaging.state_dict().get("average", {}).values()
        parts = [self.strategy.part(tensor) for tensor in found]
        return [part.tensor if isinstance(part, Part) else part for part in parts]

    def state(self) -> Tree:
        """All that a resumed run needs beside the model, as this process writes it into a checkpoint."""
        optimizer = optimizer_tree(self.optimizer, self.master_model)
        averaging = self.averaging.state_dict()
        return {
            "progress": self.progress.state_dict(),
            "optimizer": {**optimizer, "state": _mapped(optimizer["state"], self.strategy.part)},
            "averaging": _mapped(averaging, self.strategy.part),
            "precision": self.precision.state_dict(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "meters": self.meters.state_dict(),
            "metrics": self.metrics,
            "pending": [action for action in self.pending if action != "save"],
            "threads": self.threads,
            "micro_batch_size": self.batches.updates.micro_batch_size,
            "world": self.world.size,
            "recipe": self.recipe,
            "data": self.data,
            "versions": {"torch": torch.__version__},
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same recipe, to the bit."""
        check_state(checkpoint)
        state, place = checkpoint.state, self.strategy.place
        shapes = dict(self.master_model.named_parameters())
        self.load_model(checkpoint)
        optimizer = state["optimizer"]
        parts = {
            name: {key: place(value, shapes[name]) if isinstance(value, Tensor) else value for key, value in of.items()}
            for name, of in optimizer["state"].items()
            if name in shapes
        }
        with restoring("optimizer", checkpoint.path):
            load_optimizer(self.optimizer, self.master_model, {**optimizer, "state": parts})
        self.progress.load_state_dict(state["progress"])
        self.load_average(checkpoint)
        with restoring("precision", checkpoint.path):
            self.precision.load_state_dict(state["precision"])
        with restoring("losses or task", checkpoint.path):
            load_state(self.parts, state.get("parts", {}))
        self.meters.load_state_dict(state["meters"])
        self.metrics = state["metrics"]
        self.pending = [action for action in state.get("pending", []) if action != "test" or self.progress.is_done]
        if checkpoint.metrics:  # its evaluation was finished, after it was saved
            self.metrics = {**self.metrics, "val": checkpoint.metrics}
            self.evaluated_step = self.progress.step
        self.freezing.apply(self.progress.step)
        self.strategy.rewrap()
        self._keep_choices(state)

    @property
    def test_splits(self) -> list[str]:
        """What is measured after the last step: test, or each of several test sets as test.NAME."""
        return [split for split in self.evaluations if split.partition(".")[0] == "test"]

    @property
    def pending_splits(self) -> set[str]:
        """The splits whose metrics of the present step are still to be recorded; of the test split those of the end."""
        pending = {"train"} if "record" in self.pending else set()
        is_evaluated = self.evaluated_step == self.progress.step
        return pending | set(self.test_splits) | ({"val"} if "evaluate" in self.pending and not is_evaluated else set())

    def load_model(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint's weights into the model it was taken from."""
        own = self.master_model.state_dict()
        given = {
            name: self.strategy.place(tensor, own[name]) if name in own else tensor
            for name, tensor in checkpoint.model.items()
        }
        try:
            self.master_model.load_state_dict(given)
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint.path} does not fit the model of this recipe: {error}") from error
        self.precision.sync_weights()

    def load_average(self, checkpoint: Checkpoint) -> None:
        """Take over the average of the weights, if there is one."""
        state, shapes = checkpoint.state["averaging"], dict(self.master_model.named_parameters())
        average = {
            name: self.strategy.place(tensor, shapes[name]) if name in shapes else tensor
            for name, tensor in state.get("average", {}).items()
        }
        with restoring("average of the weights", checkpoint.path):
            self.averaging.load_state_dict({**state, "average": average} if average else state)

    def _keep_choices(self, state: Tree) -> None:
        """What was chosen automatically at the first start stays, whatever this machine would choose."""
        if state["world"] == self.world.size or self.strategy.name == "ordered":
            self.threads = state["threads"]
            torch.set_num_threads(self.threads)
            self.batches.updates = replace(self.batches.updates, micro_batch_size=state["micro_batch_size"])


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
