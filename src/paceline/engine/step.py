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
            # Times the loss scale. In the last backward pass, ddp and fsdp average over ranks: a sum with grad_divisor.
            run.precision.backward(losses.to_backward(terms, micro, run.strategy.grad_divisor))
        losses.add(terms, micro)
    losses.wait()  # a rank without micro-batches has not yet

    # `deterministic` sums gradients now. Ranks share buffers, but for BatchNorm's, which follow rank 0 at saves.
    run.strategy.after_backward(step_batch)
    run.precision.unscale(run.optimized)
    # The norm over all ranks before clipping; a gradient that is not finite is not clipped.
    grad_norm = run.clip_gradients(run.strategy.local(run.optimized))
    lr = run.scheduler.apply(step_batch.step)  # a function of the step alone
    overflowed = run.precision.update_loss_scale(grad_norm)
    # If the norm is not finite, this step is skipped and, where the run is to stop, all later ones. A GPU decides that
    # itself, and the host learns of it when it reads losses (training_log.read_results).
    if run.finite_check.decide(grad_norm, overflowed):
        run.optimizer.step()
    run.precision.sync_weights()
    run.buffer_backup.restore(run.finite_check.found_inf)
    run.averaging.update(run.state.model)  # parameters only; after a skipped step too, with the same weights
    for parameter in run.optimized:  # what optimizer.zero_grad does, without its profiler range
        parameter.grad = None
    run.progress.step = step_batch.step + 1
    return StepResult(step_batch.step, losses, grad_norm, lr, losses.should_stop, overflowed)
