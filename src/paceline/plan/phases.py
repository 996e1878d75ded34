"""The phases of a run, which need different memory: parameters that begin to learn, and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from paceline.core.intervals import to_steps
from paceline.core.process import num_cores
from paceline.data.sampler import evaluation_slices
from paceline.engine.evaluate import evaluation_mode, measure_batches
from paceline.engine.run import EvaluationSet, Run
from paceline.plan.memory import Memory, MemoryTracker
from paceline.plan.refusal import limit_of_fake_tensors


class Phase(NamedTuple):
    """Steps between which no further parameters begin to learn."""

    name: str
    """What messages call it."""
    step: int
    """Its first step."""
    share: float
    """Of the steps of the run."""


def training_phases(run: Run) -> list[Phase]:
    """The phases of a run's steps, in order."""
    starts = [0, *run.freezing.unfreeze_steps]
    whole = run.progress.total_steps
    ends = [*starts[1:], whole]
    return [Phase(_name(run, start), start, (end - start) / whole) for start, end in zip(starts, ends, strict=True)]


def _name(run: Run, step: int) -> str:
    if not step:
        return "from the start" if run.freezing.unfreeze_steps else "training"
    when = f"step {step:,}"
    for stage in run.state.recipe["model"]["unfreeze"]:  # its epochs are known even if the length of the data is not
        if stage["at_epochs"] and round(to_steps(stage["at_epochs"], None, run.progress.steps_per_epoch, 0)) == step:
            when = f"epoch {stage['at_epochs']:g}"
    return f"from {when}, after unfreezing {run.freezing.modules(run.freezing.due(step))}"


def begin(run: Run, phase: Phase) -> None:
    """Let the parameters learn that learn in this phase, the one after that of the run."""
    if phase.step:
        run.unfreeze(phase.step)


def evaluation_memory(
    run: Run, split: str, size: int, parallel: int, tracker: MemoryTracker, is_fake: bool
) -> tuple[Memory, int]:
    """What evaluating `parallel` batches of this size at once takes at most, and how much of it is for the batches.

    One is evaluated. Fake tensors are followed as far as they go: to what depends on values, such as the choice of
    boxes, after which little is left to do.
    """
    one = replace(run.evaluations[split], num_workers=0, threads=num_cores())
    with _averaged(run, split):
        tracker.reset_peak()
        before = tracker.passing
        try:
            _evaluate(run, one, size, 1)
        except Exception as error:
            if not is_fake or limit_of_fake_tensors(error) is None:
                raise
    peak = tracker.peak
    batches = parallel * (tracker.peak_passing - before)
    return Memory({**peak.parts, "activations": peak.parts["activations"] + batches - batches // parallel}), batches


def measure_together(run: Run, split: str, size: int, number: int) -> None:
    """Evaluate so many batches as a run does, several at once."""
    with _averaged(run, split):
        _evaluate(run, run.evaluations[split], size, number)


@contextmanager
def _averaged(run: Run, split: str) -> Iterator[None]:
    """Inside, the averaged weights, if any, are in the model beside its own."""
    with evaluation_mode(run, run.evaluations[split].threads), run.averaging.swap_in(run.state.model):
        yield


def _evaluate(run: Run, evaluated: EvaluationSet, size: int, number: int) -> None:
    slices = evaluation_slices(number * size, size)
    for _ in measure_batches(run, evaluated, run.task.metrics(), slices, lambda batch, predictions: None):
        pass
