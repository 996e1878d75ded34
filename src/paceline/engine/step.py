"""One optimizer step: forward, loss, backward, clip, step."""

from __future__ import annotations

from paceline.data.loader import StepBatch
from paceline.engine.forward import forward, start_losses, warm_up
from paceline.engine.run import Run, StepResult


def train_step(run: Run, step_batch: StepBatch) -> StepResult:
    """One step on a global batch, by whose counts losses are divided, however many micro-batches and ranks share it."""
    if step_batch.step in run.freezing.unfreeze_steps:
        run.unfreeze(step_batch.step)
    warm_up(run, step_batch)
    run.buffer_backup.keep()

    losses = start_losses(run, step_batch)
    for micro in step_batch.micro_batches:
        with run.strategy.accumulate(micro, is_last=micro is step_batch.micro_batches[-1]):
            terms = forward(run, micro)
            run.precision.backward(losses.scaled(terms, micro, run.strategy.factor))  # ddp sums gradients in the last
        losses.add(terms, micro)
    losses.wait()

    run.strategy.after_backward(step_batch)
    run.precision.unscale(run.trainable)
    grad_norm = run.clip_gradients(run.strategy.local(run.trainable))
    lr = run.scheduler.apply(step_batch.step)
    overflowed = run.precision.overflowed(grad_norm)
    run.finite_check.decide(grad_norm, overflowed)  # on the device: if the norm is not finite, the step is skipped
    run.saver.release()  # a checkpoint may still be copying the weights that change now
    run.optimizer.step()
    run.precision.sync_weights()
    run.buffer_backup.restore(run.finite_check.found_inf)
    run.averaging.update(run.state.model)
    for parameter in run.trainable:  # what optimizer.zero_grad does, without its hooks
        parameter.grad = None
    run.progress.step = step_batch.step + 1
    return StepResult(step_batch.step, losses, grad_norm, lr, losses.should_stop, overflowed)
