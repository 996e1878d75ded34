"""One optimizer step: forward, loss, backward, clip, step; and the forward pass of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from time import perf_counter

import torch
from torch import Tensor, nn

from paceline.core.torch_private import is_compiled
from paceline.data.batch import Batch
from paceline.data.loader import MicroBatch, StepBatch
from paceline.data.rng import derive
from paceline.engine.loss_accumulator import LossAccumulator, WeightedLoss, sum_rows, zeros_to_sum
from paceline.engine.run import StepResult, Trainer
from paceline.losses.loss_term import LossTerm
from paceline.tasks.task import check_terms

# For `train.channels_last: auto`, a rule on the model and its images, since the memory layout changes bits.
_MIN_VALUES = 1 << 15  # of the images of a micro-batch; with fewer, other things than convolutions take the time
_MIN_CHANNELS = 8  # narrower layers fill no vector of the processor
_MAX_WEIGHTS = 50  # per value of the images: large kernels over few pixels are faster in oneDNN's own layout


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
    grad_norm = trainer.clip(trainer.strategy.local(trainer.optimized))
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


def transformed(trainer: Trainer, micro: MicroBatch) -> Batch:
    """The micro-batch as the model sees it: on the device, batch transforms applied."""
    return trainer.train_loader.transform_batch(micro.batch, micro.epoch, trainer.world.device, micro.step)


def forward(trainer: Trainer, micro: MicroBatch) -> Mapping[str, LossTerm]:
    """The losses of a micro-batch.

    The model's generators (dropout) are seeded from (seed, step, micro-batch). Batch transforms draw from (seed, epoch,
    sample), or from (seed, step) where all samples share a draw, so transforming a micro-batch again gives the same.
    """
    trainer.heartbeat.beat(micro.step, "in a forward pass")
    started = perf_counter()
    trainer.world.seed(derive(trainer.seed, micro.step, micro.index))
    batch = micro.transformed or transformed(trainer, micro)
    micro.transformed = None  # its memory is needed
    with trainer.precision.compute():
        terms = check_terms(trainer.task, trainer.task.losses(trainer.strategy.network, batch))
    trainer.timer.forward_seconds += perf_counter() - started
    trainer.heartbeat.beat(micro.step, "in a backward pass or exchanging gradients")
    return terms


def start_losses(trainer: Trainer, step_batch: StepBatch) -> LossAccumulator:
    """The accumulator of a step's losses; their counts are on the way to the other ranks."""
    if not trainer.train_loader.keeps_counts:  # transforms such as mixup change what losses are divided by
        for micro in step_batch.micro_batches:
            micro.transformed = transformed(trainer, micro)
    counts = [(micro, trainer.task.counts(micro.transformed or micro.batch)) for micro in step_batch.micro_batches]
    return LossAccumulator(
        trainer.task.weights,
        step_batch.num_micro_batches,
        counts,
        trainer.world,
        trainer.stop.requested,
        first_pass=lambda names: _sum_ratios(trainer, step_batch, names),
        metrics=trainer.training_metrics,
        divisors=getattr(trainer.task, "divisors", dict),
    )


def _sum_ratios(trainer: Trainer, step_batch: StepBatch, names: list[str]) -> Tensor:
    """Sums and counts of ratio losses over the global batch: same seeds, same state, which stays unchanged."""
    rows = zeros_to_sum(step_batch.num_micro_batches, 2 * len(names), trainer.world.device)
    with torch.no_grad(), trainer.strategy.unchanged():
        for micro in step_batch.micro_batches:
            with trainer.strategy.preview():
                terms = forward(trainer, micro)
            if not micro.is_padding:
                parts = [part for name in names for part in (terms[name].numerator, terms[name].denominator)]
                rows[micro.index] = torch.stack(
                    [part.to(rows) if isinstance(part, Tensor) else rows.new_full((), part) for part in parts]
                )
    return sum_rows(rows, trainer.world)


def warm_up(trainer: Trainer, step_batch: StepBatch) -> None:
    """Before the first step, choose the memory layout; then and after each unfreeze, run the passes that ddp needs."""

    def discarded_pass() -> None:
        """A forward and a backward pass whose gradients are 0; the caller clears them."""
        terms = forward(trainer, step_batch.micro_batches[-1])  # only when asked for: an empty rank has none
        trainer.precision.backward([WeightedLoss(term.numerator, 0.0) for term in terms.values()])

    if trainer.state.choices.channels_last is None:
        choose_channels_last(trainer, step_batch)
    trainer.strategy.warm_up(discarded_pass)


def choose_channels_last(trainer: Trainer, step_batch: StepBatch) -> None:
    """Choose the memory layout of images and weights on a CPU; rank 0, whose images may have other sizes, decides."""
    world = trainer.world
    is_sharded = trainer.strategy.passes == "equal"
    can_choose = world.is_main and world.device.type == "cpu" and not is_compiled(trainer.model) and not is_sharded
    chosen = can_choose and is_channels_last_faster(trainer.model, step_batch.micro_batches[0].batch["image"])
    trainer.state.set_channels_last(bool(world.start_sum([float(chosen)])()[0]))


def is_channels_last_faster(model: nn.Module, images: Iterable[Tensor]) -> bool:
    """Whether a training step of this model on a CPU is faster in channels_last, as measured for many models."""
    sizes = [image.shape for image in images]
    values = sum(size.numel() for size in sizes)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    kernels = [
        # Not of `weight`: where it is parametrized, as by spectral norm, a look at it changes buffers, here on rank 0.
        each.in_channels * each.out_channels * math.prod(each.kernel_size)
        for each in convolutions
        if each.groups == 1 and each.kernel_size != (1, 1)
    ]
    return (
        all(len(size) == 3 for size in sizes)
        and max((each.out_channels for each in convolutions), default=0) >= _MIN_CHANNELS
        and values >= max(_MIN_VALUES, sum(kernels) / _MAX_WEIGHTS)
    )
