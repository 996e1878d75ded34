"""The forward pass of a micro-batch: batch transforms on the device, seeded generators, the model and its losses."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.loader import MicroBatch, StepBatch
from paceline.data.rng import derive
from paceline.engine.channels_last import choose_channels_last
from paceline.engine.loss_accumulator import LossAccumulator, WeightedLoss, sum_rows, zeros_to_sum
from paceline.engine.trainer import Trainer
from paceline.losses.loss_term import LossTerm
from paceline.tasks.task import check_terms


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

    def one_pass() -> None:
        discarded_pass(trainer, step_batch.micro_batches[-1])  # only when asked for: an empty rank has none

    if trainer.state.choices.channels_last is None:
        choose_channels_last(trainer, step_batch)
    trainer.strategy.warm_up(one_pass)


def discarded_pass(trainer: Trainer, micro: MicroBatch) -> None:
    """A forward and a backward pass whose gradients are 0; the caller clears them."""
    terms = forward(trainer, micro)
    trainer.precision.backward([WeightedLoss(term.numerator, 0.0) for term in terms.values()])
