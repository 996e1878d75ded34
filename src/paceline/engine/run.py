"""What a step and the training loop work with: a trainer, and a run with data, evaluations, checkpoints, loggers."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.store import Store
from paceline.checkpoint.writer import Saver
from paceline.core.intervals import Triggers
from paceline.core.process import StopRequest
from paceline.core.world import World
from paceline.data.loader import StepBatch, TrainBatches, automatic_batch_size, automatic_workers
from paceline.data.padding import padding_for
from paceline.data.split_loader import LabelCheck, SplitLoader
from paceline.engine.loss_accumulator import LossAccumulator
from paceline.engine.state import RunState
from paceline.engine.stateful import KeptState
from paceline.engine.watchdog import Heartbeat, NoHeartbeat
from paceline.loggers.events import LoggerGroup
from paceline.loggers.meters import StepTimer
from paceline.models.freezing import Freezing
from paceline.optim.clipping import Clip, Norm, norm_alone
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


@dataclass(kw_only=True)
class Trainer:
    """What `train_step` takes: everything that turns a global batch into an optimizer step."""

    seed: int
    world: World
    task: Task
    model: nn.Module
    """What computes. With O2 it holds float16 copies of the weights of `state.model`; else both are one object."""
    state: RunState
    """Everything that a checkpoint holds: the optimizer, the precision, the progress and more."""
    scheduler: Scheduler
    train_loader: SplitLoader
    clip_gradients: Clip | None = None
    """None measures the norm alone."""
    freezing: Freezing = field(default_factory=lambda: Freezing(nn.Identity()))
    heartbeat: Heartbeat | NoHeartbeat = field(default_factory=NoHeartbeat)
    stop: StopRequest = field(default_factory=StopRequest)
    timer: StepTimer = field(default_factory=StepTimer)

    def __post_init__(self) -> None:
        state = self.state
        self.progress, self.optimizer, self.strategy = state.progress, state.optimizer, state.strategy
        self.precision, self.finite_check, self.averaging = state.precision, state.finite_check, state.averaging
        self.strategy.parts = state.parts
        self.clip = self.clip_gradients or norm_alone(self.world.device, self.strategy.norm_across)
        self.finite_check.attach(self.optimizer, self.world.device)
        self.optimized = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        own = getattr(self.task, "training_metrics", ())
        self.training_metrics = [name for name in own if name not in self.task.weights]

    def keep_state(self) -> KeptState:
        """What a skipped step must leave as it is beside the weights: nothing in a run that ends at the first one."""
        can_continue = self.finite_check.policy == "skip" or self.precision.has_loss_scale
        return KeptState(self.model.modules(), self.state.parts) if can_continue else KeptState((), {})

    def unfreeze(self, step: int) -> None:
        """Unfreeze the parameters whose training starts with this step."""
        self.freezing.apply(step)
        self.strategy.rewrap()


def label_checks(task: Task) -> list[LabelCheck]:
    """What a task's losses check of each batch on the host, such as labels out of range."""
    losses = getattr(task, "loss_functions", {}).values()
    return [loss.check for loss in losses if hasattr(loss, "check")]


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


def make_evaluation_set(
    loader: SplitLoader,
    world: World,
    batch_size: int | Literal["auto"] = "auto",
    num_workers: int | Literal["auto"] = "auto",
    threads: int = 1,
) -> EvaluationSet:
    """A split to evaluate; by default in batches that fit the device, read in the way that is fastest there."""
    is_cpu = world.device.type == "cpu"
    if batch_size == "auto":
        batch_size = automatic_batch_size(loader, is_cpu)
    if num_workers == "auto":
        # On a CPU, the threads that measure also read: worker processes would only compete with them.
        num_workers = 0 if is_cpu else automatic_workers(loader, world)
    return EvaluationSet(loader, batch_size, num_workers, threads)


@dataclass(frozen=True)
class RunInfo:
    """What a run records and prints about itself, beside its metrics; see `run.train`."""

    task: str = ""
    model: str = ""
    """Names, for the console and the results table."""
    recipe_yaml: str = ""
    """The resolved recipe, with where each value came from; empty without a recipe."""
    notes: Sequence[str] = ()
    """Lines about its data and parts."""
    lr: str = ""
    """The learning rate and where it comes from; empty: that of the schedule."""
    origin_of_weights: Sequence[str] = ("weights  random",)
    precision: str = "fp32"
    """Its name in recipes; only others are printed."""
    checkpointed_blocks: int = 0
    """The number of blocks with activation checkpointing."""
    expect: Mapping[str, float] = field(default_factory=dict)
    """Metrics that it is known to reach."""
    hang_seconds: float = 600.0
    """After how long without progress a rank is said to hang."""
    tensorboard: bool = True
    results: Path | None = None
    """A table of results, .csv or .xlsx, that gets a row."""
    wandb: Mapping[str, Any] | None = None
    mlflow: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class Run(Trainer):
    """What the training loop needs beside its step; built by `recipe.build`, changed by `train_step` and `train`."""

    name: str
    out: Path
    batches: TrainBatches
    evaluations: dict[str, EvaluationSet]
    intervals: Intervals
    store: Store
    info: RunInfo = field(default_factory=RunInfo)
    explain_nonfinite: Callable[[Run, StepBatch], str] | None = None
    """Names the module and the samples behind a non-finite gradient; None: `replay.explain_and_keep`."""
    logger: LoggerGroup = field(default_factory=LoggerGroup)
    lr_changes: LRChangeLog = field(default_factory=LRChangeLog)
    visualize: bool = True
    save_predictions: bool = False
    unread: list[StepResult] = field(default_factory=list)
    """Steps whose losses are still on the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.saver = self._make_saver()
        self.batches.passes = self.strategy.passes
        for loader in (self.train_loader, *(each.loader for each in self.evaluations.values())):
            loader.checks = label_checks(self.task)
            loader.padding = padding_for(self.task, self.model, loader.dataset)

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

    def _make_saver(self) -> Saver:
        """The saver: rank 0 writes if every rank holds everything, else each rank writes its shards."""
        if self.strategy.passes == "equal":
            token = self.world.start_sum([float(secrets.randbits(50)) if self.world.is_main else 0.0])()[0]
            return Saver(self.store, self.world.rank, self.world.size, f"{token:.0f}")
        return Saver(self.store, writes=self.world.is_main)
