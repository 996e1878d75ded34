"""A run: the objects that train a model. `Run.state` is what a checkpoint saves."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.store import Store
from paceline.checkpoint.writer import NoSaver, Saver
from paceline.core.errors import TrainingError
from paceline.core.intervals import Progress, Triggers
from paceline.core.process import StopRequest
from paceline.core.world import World
from paceline.data.loader import StepBatch, TrainBatches
from paceline.data.split_loader import SplitLoader
from paceline.engine.loss_accumulator import LossAccumulator, read_columns
from paceline.engine.nonfinite import BufferBackup, FiniteCheck, NoBackup
from paceline.engine.precision.base import Precision
from paceline.engine.state import RunState
from paceline.engine.strategies.single import SingleStrategy
from paceline.engine.timing import StepTimer
from paceline.engine.watchdog import Heartbeat, NoHeartbeat
from paceline.loggers.events import Logged, LoggerGroup, Note
from paceline.models.freezing import Freezing
from paceline.optim.averaging import Averaging
from paceline.optim.clipping import Clip, NoClip, Norm
from paceline.optim.lr_scheduler import LRChangeLog, Scheduler
from paceline.tasks.task import Task


class StepResult(NamedTuple):
    """What a step did.

    Losses and the gradient norm stay on the device until `read_results`: at a line of the log, unless the last was a
    moment ago, at a save or an evaluation, or when 100 steps are unread.
    """

    step: int
    accumulator: LossAccumulator
    grad_norm: Norm
    lr: float
    should_stop: bool
    """Whether any rank was asked to stop; all ranks agree."""
    overflowed: Tensor | None = None
    """Whether a non-finite norm is blamed on the loss scale: any is, until the scale is at its least (a fixed scale:
    after 50 in a row). None without a loss scale."""

    @property
    def losses(self) -> dict[str, Tensor]:
        """The weighted sum as "loss", then each loss by name: this rank's share of them, read from the device."""
        return self.accumulator.own()

    @property
    def skipped(self) -> bool:
        """Whether its gradient was not finite, so that it changed no weights; reads the norm from the device."""
        return not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Intervals:
    """How often things are done, in steps."""

    evaluate: float
    log: float
    save: float


@dataclass(frozen=True)
class EvaluationSet:
    """A split to evaluate, and its batch size: both independent of the number of processes."""

    loader: SplitLoader
    batch_size: int
    num_workers: int
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
    """What computes. With O2 it holds float16 copies of the weights of `state.model`; else both are one object."""
    state: RunState
    scheduler: Scheduler
    train_loader: SplitLoader
    batches: TrainBatches
    evaluations: dict[str, EvaluationSet]
    intervals: Intervals
    store: Store
    clip_gradients: Clip = field(default_factory=NoClip)
    freezing: Freezing = field(default_factory=lambda: Freezing(nn.Identity()))
    explain_nonfinite: Callable[[Run, StepBatch], str] = lambda run, step_batch: "cause unknown"
    """Names the module and the samples behind a non-finite gradient."""
    buffer_backup: BufferBackup | NoBackup = field(default_factory=NoBackup)
    heartbeat: Heartbeat | NoHeartbeat = field(default_factory=NoHeartbeat)
    logger: LoggerGroup = field(default_factory=LoggerGroup)
    stop: StopRequest = field(default_factory=StopRequest)
    timer: StepTimer = field(default_factory=StepTimer)
    lr_changes: LRChangeLog = field(default_factory=LRChangeLog)
    visualize: bool = True
    save_predictions: bool = False
    builder: Any = None
    """What built it from a recipe, if anything did."""
    unread_results: list[StepResult] = field(default_factory=list)
    """Steps whose losses are still on the device."""
    unwritten_lines: list[Logged] = field(default_factory=list)
    """Lines of the log that wait for these losses."""
    next_read: float = 0.0
    """The moment before which a line of the log may wait."""

    def __post_init__(self) -> None:
        self.strategy.parts = self.state.parts
        self.finite_check.attach(self.optimizer, self.world.device)
        self.saver = self._make_saver()
        self.optimized = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        own = getattr(self.task, "training_metrics", ())
        self.training_metrics = [name for name in own if name not in self.task.weights]

    @property
    def progress(self) -> Progress:
        """How many steps are done."""
        return self.state.progress

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.state.optimizer

    @property
    def strategy(self) -> SingleStrategy:
        """The strategy: how ranks share the model and its gradients."""
        return self.state.strategy

    @property
    def precision(self) -> Precision:
        """The precision that the model computes in."""
        return self.state.precision

    @property
    def finite_check(self) -> FiniteCheck:
        """What decides about gradients that are not finite."""
        return self.state.finite_check

    @property
    def averaging(self) -> Averaging:
        """The average of the weights."""
        return self.state.averaging

    def check_finite(self, results: Sequence[StepResult]) -> list[float]:
        """The gradient norms of steps, in order, read from the device: warns of those skipped.

        Raises TrainingError if the run must stop.

        The step is loaded again to name the module and the samples. The weights are those before it, unless training
        went on from a skipped step.
        """
        [norms] = read_columns([[result.grad_norm for result in results]])
        for result, norm in zip(results, norms, strict=True):
            self.check_norm(result, norm)
        return norms

    def check_norm(self, result: StepResult, norm: float) -> None:
        """The same for one step whose norm was read."""
        if math.isfinite(norm):
            self.finite_check.in_a_row = 0
        elif result.overflowed is None or not result.overflowed:
            try:
                self.finite_check.report(
                    norm,
                    result.step,
                    explain=lambda: self.explain_nonfinite(self, self.batches.load_step(result.step)),
                    warn=lambda text: self.logger.emit(Note(text, "warning")),
                )
            except TrainingError:
                self.progress.step = result.step + 1  # steps after it changed nothing
                raise

    def unfreeze(self, step: int) -> None:
        """Unfreeze the parameters whose training starts with this step."""
        self.freezing.apply(step)
        self.strategy.rewrap()
        self.logger.emit(Note(self.freezing.describe_unfrozen(step)))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same recipe, bit-identically."""
        self.state.load(checkpoint)
        self.unfreeze(self.progress.step)
        torch.set_num_threads(self.state.choices.threads)
        micro_batch_size = self.state.choices.micro_batch_size
        self.batches.sampler = replace(self.batches.sampler, micro_batch_size=micro_batch_size)

    def triggers(self) -> Triggers:
        """The triggers: what is due after which steps."""
        triggers = Triggers(self.progress.total_steps)
        triggers.add(self.intervals.save, "save")
        if "val" in self.evaluations:
            triggers.add(self.intervals.evaluate, "evaluate")
        triggers.add(self.intervals.log, "log")
        if self.test_splits:
            triggers.add(math.inf, "test")  # once, after the last step
        return triggers

    @property
    def test_splits(self) -> list[str]:
        """The splits to evaluate after the last step: test, or each of several test sets as test.NAME."""
        return [split for split in self.evaluations if split.partition(".")[0] == "test"]

    @property
    def pending_splits(self) -> set[str]:
        """The splits whose metrics of the current step are not logged yet; test sets are due at the end."""
        state = self.state
        pending = {"train"} if "log" in state.pending else set()
        is_evaluated = state.evaluated_step == self.progress.step
        has_val = "evaluate" in state.pending and not is_evaluated
        return pending | set(self.test_splits) | ({"val"} if has_val else set())

    def _make_saver(self) -> Saver | NoSaver:
        """The saver: rank 0 writes if every rank holds everything, else each rank writes its shards."""
        if self.strategy.passes == "equal":
            token = self.world.start_sum([float(secrets.randbits(50)) if self.world.is_main else 0.0])()[0]
            return Saver(self.store, self.world.rank, self.world.size, f"{token:.0f}")
        return Saver(self.store) if self.world.is_main else NoSaver(self.store)
