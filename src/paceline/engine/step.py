"""One optimizer update."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.data.loader import Update
from paceline.engine.objective import add_up, forward, totals, weighted_sum
from paceline.engine.run import Run


class StepResult(NamedTuple):
    """What an update did. Losses and norm are tensors that nobody has read yet."""

    losses: dict[str, Tensor]
    """The weighted sum as "loss", then each loss by its name."""
    grad_norm: Tensor
    lr: float
    should_stop: bool
    """Whether any process was asked to stop; all processes agree."""


def train_step(run: Run, update: Update) -> StepResult:
    """Forward, backward, clip, step: the same update however it is divided into micro-batches and processes."""
    if update.step in run.freezing.unfreeze_steps:
        run.freezing.apply(update.step)
    denominators, should_stop = totals(run, update)
    weights = run.task.weights
    parts: dict[str, list[Tensor]] = {name: [] for name in weights}

    for micro in update.microbatches:
        with run.parallel.accumulate(is_last=micro is update.microbatches[-1]):
            terms = forward(run, micro)
            run.precision.backward([denominators[name].objective(term, weights[name]) for name, term in terms.items()])
        for name, term in terms.items():
            parts[name].append(denominators[name].reported(term))

    losses = {name: add_up(values) for name, values in parts.items()}
    losses = {"loss": weighted_sum(losses, weights), **losses}
    grad_norm = run.clip(run.learning)
    run.health.judge(update, grad_norm, losses)

    lr = run.plan.apply(update.step)
    run.optimizer.step()
    for parameter in run.learning:  # what optimizer.zero_grad does, without its hooks
        parameter.grad = None
    run.averaging.update(run.model)
    run.progress.step = update.step + 1
    return StepResult(losses, grad_norm, lr, should_stop)
