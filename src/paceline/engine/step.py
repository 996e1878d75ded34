"""One optimizer step: forward, loss, backward, clip, step."""

from __future__ import annotations

from paceline.data.loader import StepBatch
from paceline.engine.forward import forward, start_losses, warm_up
from paceline.engine.trainer import StepResult, Trainer


def train_step(trainer: Trainer, step_batch: StepBatch) -> StepResult:
    """One step on a global batch, by whose counts losses are divided, however many micro-batches and ranks share it."""
    if step_batch.step in trainer.freezing.unfreeze_steps:
        trainer.unfreeze(step_batch.step)
    warm_up(trainer, step_batch)
    kept = trainer.keep_state()

    losses = start_losses(trainer, step_batch)
    for micro in step_batch.micro_batches:
        with trainer.strategy.accumulate(micro, is_last=micro is step_batch.micro_batches[-1]):
            terms = forward(trainer, micro)
            # Times the loss scale. In the last backward pass, ddp and fsdp average over ranks: a sum with grad_divisor.
            trainer.precision.backward(losses.to_backward(terms, micro, trainer.strategy.grad_divisor))
        losses.add(terms, micro)
    losses.wait()  # a rank without micro-batches has not yet

    # `deterministic` sums gradients now. Ranks share buffers, but for BatchNorm's, which follow rank 0 at saves.
    trainer.strategy.after_backward(step_batch)
    trainer.precision.unscale(trainer.optimized)
    # The norm over all ranks before clipping; a gradient that is not finite is not clipped.
    grad_norm = trainer.clip_gradients(trainer.strategy.local(trainer.optimized))
    lr = trainer.scheduler.apply(step_batch.step)  # a function of the step alone
    overflowed = trainer.precision.update_loss_scale(grad_norm)
    # If the norm is not finite, this step is skipped and, where the run is to stop, all later ones. A GPU decides that
    # itself, and the host learns of it when it reads losses (loop.read_results).
    if trainer.finite_check.decide(grad_norm, overflowed):
        trainer.optimizer.step()
    trainer.precision.sync_weights()
    kept.restore_where(trainer.finite_check.found_inf)
    trainer.averaging.update(trainer.state.model)  # parameters only; after a skipped step too, with the same weights
    for parameter in trainer.optimized:  # what optimizer.zero_grad does, without its profiler range
        parameter.grad = None
    trainer.progress.step = step_batch.step + 1
    return StepResult(step_batch.step, losses, grad_norm, lr, losses.should_stop, overflowed)
