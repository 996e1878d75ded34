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
from paceline.engine.run import Run
from paceline.losses.loss_term import AnyTerm
from paceline.tasks.task import check_terms


def transformed(run: Run, micro: MicroBatch) -> Batch:
    """The micro-batch as the model sees it: on the device, batch transforms applied."""
    return run.train_loader.transform_batch(micro.batch, micro.epoch, run.world.device, micro.step)


def forward(run: Run, micro: MicroBatch) -> Mapping[str, AnyTerm]:
    """The losses of a micro-batch.

    The model's generators (dropout) are seeded from (seed, step, micro-batch). Batch transforms draw from (seed, epoch,
    sample), or from (seed, step) where all samples share a draw, so transforming a micro-batch again gives the same.
    """
    run.heartbeat.beat(micro.step, "in a forward pass")
    started = perf_counter()
    run.world.seed(derive(run.seed, micro.step, micro.index))
    batch = micro.transformed or transformed(run, micro)
    micro.transformed = None  # its memory is needed
    with run.precision.compute():
        terms = check_terms(run.task, run.task.losses(run.strategy.network, batch))
    run.timer.forward_seconds += perf_counter() - started
    run.heartbeat.beat(micro.step, "in a backward pass or exchanging gradients")
    return terms


def start_losses(run: Run, step_batch: StepBatch) -> LossAccumulator:
    """The accumulator of a step's losses; their counts are on the way to the other ranks."""
    if not run.train_loader.keeps_counts:  # transforms such as mixup change what losses are divided by
        for micro in step_batch.micro_batches:
            micro.transformed = transformed(run, micro)
    counts = [(micro, run.task.counts(micro.transformed or micro.batch)) for micro in step_batch.micro_batches]
    return LossAccumulator(
        run.task.weights,
        step_batch.num_micro_batches,
        counts,
        run.world,
        run.stop.requested,
        first_pass=lambda names: _sum_ratios(run, step_batch, names),
        metrics=run.training_metrics,
    )


def _sum_ratios(run: Run, step_batch: StepBatch, names: list[str]) -> Tensor:
    """Sums and counts of ratio losses over the global batch: same seeds, same state, which stays unchanged."""
    rows = zeros_to_sum(step_batch.num_micro_batches, 2 * len(names), run.world.device)
    with torch.no_grad(), run.strategy.unchanged():
        for micro in step_batch.micro_batches:
            with run.strategy.preview():
                terms = forward(run, micro)
            if not micro.is_padding:
                parts = [part for name in names for part in (terms[name].numerator, terms[name].denominator)]
                rows[micro.index] = torch.stack(
                    [part.to(rows) if isinstance(part, Tensor) else rows.new_full((), part) for part in parts]
                )
    return sum_rows(rows, run.world)


def warm_up(run: Run, step_batch: StepBatch) -> None:
    """Before the first step, choose the memory layout; then and after each unfreeze, run the passes that ddp needs."""

    def one_pass() -> None:
        discarded_pass(run, step_batch.micro_batches[-1])  # only when asked for: an empty rank has none

    if run.state.choices.channels_last is None:
        choose_channels_last(run, step_batch)
    run.strategy.warm_up(one_pass)


def discarded_pass(run: Run, micro: MicroBatch) -> None:
    """A forward and a backward pass whose gradients are 0; the caller clears them."""
    terms = forward(run, micro)
    run.precision.backward([WeightedLoss(term.numerator, 0.0) for term in terms.values()])
