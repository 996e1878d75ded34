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
            # In the last backward pass, ddp and fsdp average gradients over ranks; times grad_divisor that is a sum.
            run.precision.backward(losses.to_backward(terms, micro, run.strategy.grad_divisor))
        losses.add(terms, micro)
    losses.wait()  # a rank without micro-batches has not yet

    run.strategy.after_backward(step_batch)  # buffers and states of losses are shared; deterministic sums gradients
    run.precision.unscale(run.optimized)
    grad_norm = run.clip_gradients(run.strategy.local(run.optimized))
    lr = run.scheduler.apply(step_batch.step)
    overflowed = run.precision.update_loss_scale(grad_norm)
    # On the device: if the norm is not finite, the optimizer skips this step and, where the run is to stop, all later
    # ones. The host learns of it when it reads losses (training_log.read_results).
    run.finite_check.decide(grad_norm, overflowed)
    run.saver.finish_copy()  # of a checkpoint that still copies the weights which change now
    run.optimizer.step()
    run.precision.sync_weights()
    run.buffer_backup.restore(run.finite_check.found_inf)
    run.averaging.update(run.state.model)  # after a skipped step too
    for parameter in run.optimized:  # what optimizer.zero_grad does, without its profiler range
        parameter.grad = None
    run.progress.step = step_batch.step + 1
    return StepResult(step_batch.step, losses, grad_norm, lr, losses.should_stop, overflowed)
