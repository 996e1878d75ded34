"""Measures whether one process would be faster than several for the same step."""

from __future__ import annotations

import time

import torch

from paceline.data.loader import MicroBatch, StepBatch
from paceline.engine.forward import discarded_pass
from paceline.engine.run import Run

AT_STEP = 12
_LEAST_STEPS = 100  # a shorter run is over before it would be worth knowing
_TIMES = 2
_MARGIN = 0.9


def is_due(run: Run) -> bool:
    """Whether to compare now: once in a run, and only if one process could run the step alone."""
    if run.world.size == 1 or run.progress.step != AT_STEP:
        return False
    return run.progress.total_steps >= _LEAST_STEPS and run.strategy.can_probe


def compare(run: Run, step_batch: StepBatch) -> str | None:
    """Advice if one process alone is faster; the other ranks wait while rank 0 measures."""
    shared = run.timer.step_time
    alone = _alone(run, step_batch) if run.world.is_main else 0.0
    alone = run.world.start_sum([alone])()[0]
    if alone >= _MARGIN * shared:
        return None
    return (
        f"{run.world.size} processes take {shared * 1e3:.0f} ms a step, one process alone {alone * 1e3:.0f} ms (both"
        " measured): exchanging gradients and sharing the machine cost more than they bring; --procs 1 is faster"
    )


def _alone(run: Run, step_batch: StepBatch) -> float:
    """Seconds for the passes of a whole step, with all the cores that the processes of this machine share."""
    threads = torch.get_num_threads()
    whole = _whole(run, step_batch)
    best = float("inf")
    try:
        if run.strategy.name != "deterministic":
            torch.set_num_threads(threads * run.world.local_size)
        with run.strategy.alone(), run.strategy.unchanged():
            for _ in range(_TIMES):
                started = time.perf_counter()
                for micro in whole:
                    discarded_pass(run, micro)
                best = min(best, time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
        for parameter in run.model.parameters():
            parameter.grad = None
    return best


def _whole(run: Run, step_batch: StepBatch) -> list[MicroBatch]:
    batches, sampler = run.batches, run.batches.sampler
    epoch = sampler.epoch(step_batch.step)
    fetched = [
        (cut.index, run.train_loader.fetch(epoch, batches.order.at(epoch, cut.start, cut.stop)))
        for cut in sampler.slices(step_batch.step)
    ]
    return [MicroBatch(step_batch.step, index, epoch, batch) for index, batch in fetched]
