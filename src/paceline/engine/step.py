"""One optimizer update."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.data.loading.loader import Update
from paceline.engine.objective import Agreement, discarded_pass, forward
from paceline.engine.run import Run
from paceline.engine.tally import Tally


class StepResult(NamedTuple):
    """What an update did. Losses and norm are tensors that nobody has read yet."""

    tally: Tally
    grad_norm: Tensor
    lr: float
    should_stop: bool
    """Whether any process was asked to stop; all processes agree."""
    skipped: bool = False
    """Whether the weights were left alone, since numbers were not finite."""

    @property
    def losses(self) -> dict[str, Tensor]:
        """The weighted sum as "loss", then each loss by its name: what this process computed of them."""
        return self.tally.own()


def train_step(run: Run, update: Update) -> StepResult:
    """Forward, backward, clip, step: the same update however it is divided into micro-batches and processes."""
    if update.step in run.freezing.unfreeze_steps:
        run.unfreeze(update.step)
    run.parallel.settle(lambda: discarded_pass(run, update))
    run.buffers.keep()
    agreement = Agreement(run, update)
    tally = Tally(run.task.weights, update.num_microbatches)

    for micro, finished in zip(update.microbatches, agreement.finished, strict=True):
        with run.parallel.accumulate(micro, is_last=micro is update.microbatches[-1]):
            terms = forward(run, micro, finished)
            tally.totals = agreement.totals()
            run.precision.backward(run.parallel.objectives(terms, tally, micro))
        if not micro.is_ghost:
            tally.add(micro.index, terms)

    tally.totals = agreement.totals()
    run.parallel.exchange(update)
    run.precision.collect(run.learning)
    grad_norm = run.clip(run.parallel.local(run.learning))
    lr = run.plan.apply(update.step)
    skipped = run.precision.overflowed(grad_norm) or not run.health.accepts(run, update, grad_norm)
    if not skipped:
        run.saver.release()
        run.optimizer.step()
        run.precision.publish()
        run.averaging.update(run.masters)
    else:
        run.buffers.put_back()
    for parameter in run.learning:  # what optimizer.zero_grad does, without its hooks
        parameter.grad = None
    run.progress.step = update.step + 1
    return StepResult(tally, grad_norm, lr, agreement.should_stop, skipped)
