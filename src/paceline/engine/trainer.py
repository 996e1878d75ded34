"""What a training step needs: the model, the task, the optimizer, and how ranks share them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.intervals import Progress
from paceline.core.process import StopRequest
from paceline.core.world import World
from paceline.data.split_loader import SplitLoader
from paceline.engine.loss_accumulator import LossAccumulator
from paceline.engine.nonfinite import FiniteCheck
from paceline.engine.precision.mixed import Precision
from paceline.engine.state import RunState
from paceline.engine.stateful import KeptState
from paceline.engine.strategies.single import SingleStrategy
from paceline.engine.timing import StepTimer
from paceline.engine.watchdog import Heartbeat, NoHeartbeat
from paceline.models.freezing import Freezing
from paceline.optim.averaging import Averaging
from paceline.optim.clipping import Clip, NoClip, Norm
from paceline.optim.lr_scheduler import Scheduler
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
    clip_gradients: Clip = field(default_factory=NoClip)
    freezing: Freezing = field(default_factory=lambda: Freezing(nn.Identity()))
    heartbeat: Heartbeat | NoHeartbeat = field(default_factory=NoHeartbeat)
    stop: StopRequest = field(default_factory=StopRequest)
    timer: StepTimer = field(default_factory=StepTimer)

    def __post_init__(self) -> None:
        self.strategy.parts = self.state.parts
        self.finite_check.attach(self.optimizer, self.world.device)
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

    def keep_state(self) -> KeptState:
        """What a skipped step must leave as it is beside the weights: nothing in a run that ends at the first one."""
        can_continue = self.finite_check.policy == "skip" or self.precision.has_loss_scale
        return KeptState(self.model.modules(), self.state.parts) if can_continue else KeptState((), {})

    def unfreeze(self, step: int) -> None:
        """Unfreeze the parameters whose training starts with this step."""
        self.freezing.apply(step)
        self.strategy.rewrap()
