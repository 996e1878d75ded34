"""The steps of a run on fake tensors: the real code of a recipe, in seconds and without its memory.

A run has phases, which need different memory: parameters that begin to learn, and the evaluation of each split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.intervals import to_steps
from paceline.core.process import num_cores
from paceline.core.text import pluralize
from paceline.core.torch_private import FakeTensorMode, unset_fake_temporarily
from paceline.core.world import World
from paceline.data.batch import IMAGE_SIZE, Batch, Sample
from paceline.data.index.folders import ANY_SIZE
from paceline.data.loader import MicroBatch, StepBatch, automatic_batch_size
from paceline.data.sampler import evaluation_slices
from paceline.data.split_loader import SplitLoader
from paceline.engine.evaluate import evaluation_mode, measure_batches, num_parallel
from paceline.engine.run import EvaluationSet, Run
from paceline.engine.step import train_step
from paceline.optim.averaging import WeightAverage
from paceline.plan.fake_tensors import FakeWorld, fake_tensors, limit_of_fake_tensors
from paceline.plan.memory import Memory, MemoryTracker, Timeline
from paceline.plan.surrogate import Shape, SurrogateBuilder, largest_draw
from paceline.recipe.build_data import make_split_loaders
from paceline.recipe.validate import CheckedRecipe

_CPU = torch.device("cpu")
_DRAWS = 8  # of random sizes, and samples that are looked at whether images differ in size
_FIRST = 2  # samples of the step that makes the optimizer's state; BatchNorm needs two


class Phase(NamedTuple):
    """Steps between which no further parameters begin to learn."""

    name: str
    """What messages call it."""
    step: int
    """Its first step."""
    share: float
    """Of the steps of the run."""


class Evaluated(NamedTuple):
    """The evaluation of a split."""

    split: str
    batch_size: int
    parallel: int
    """How many batches are evaluated at once."""
    memory: Memory
    batch_bytes: int
    """How much of the memory is for the batches."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"evaluation of {self.split}, {self.parallel} × {pluralize(self.batch_size, 'sample')} at a time"

    def largest(self, limit: int) -> int:
        """The most samples of a batch that fit, about: what they take grows evenly with them."""
        room = limit - self.memory.total + self.batch_bytes
        return max(0, room * self.batch_size // max(1, self.batch_bytes))


class Rehearsal:
    """A run on fake tensors, as the first of its processes; each step says what memory it takes."""

    def __init__(self, run: Run, example: Batch, mode: FakeTensorMode, tracker: MemoryTracker, missing: str) -> None:
        self.run = run
        self.missing = missing
        """Why samples are assumed rather than read; empty if they are read."""
        self._example = example
        self._mode = mode
        self._tracker = tracker
        average_from_the_start(run)
        self.step(_FIRST)
        tracker.add(run.averaging.state_dict().get("average", {}).values(), "parameters")

    def phases(self) -> Iterator[Phase]:
        """The phases of its steps, each begun when it is asked for, with the optimizer's state of what learns in it."""
        for phase in training_phases(self.run):
            if phase.step:
                self.run.unfreeze(phase.step)
                self.step(_FIRST)
            yield phase

    def evaluations(self, is_cpu: bool) -> Iterator[Evaluated]:
        """What it takes to evaluate each split; on a CPU, a batch on each core."""
        automatic = self.run.state.recipe["evaluate"]["batch_size"] == "auto"
        for split, each in self.run.evaluations.items():
            parallel = num_parallel(self.run, each) if is_cpu else 1
            size = automatic_batch_size(each.loader, is_cpu) if automatic else each.batch_size
            size = min(size, len(each.loader.dataset))
            try:
                memory, batches = evaluation_memory(self.run, split, size, parallel, self._tracker, is_fake=True)
            except Exception:
                if not self.missing:
                    raise
                continue  # a model may take images of the data's own size alone
            yield Evaluated(split, size, parallel, memory, batches)

    def step(self, micro_batch_size: int, micro_batches: int = 1) -> Memory:
        """What a step of micro-batches of this size takes at most; more than two take as much as two.

        It is not the first of its phase: of 91 optimizers that were tried, none took more where it made its state.
        """
        number = min(2, micro_batches)
        held = [
            MicroBatch(0, index, 0, _fake_batch(self._example, micro_batch_size, self._mode)) for index in range(number)
        ]
        with self._tracker.watch(self.run.model, self.run.optimizer):
            self._tracker.reset_peak()
            for micro in held:
                self._tracker.add(micro.batch.values(), "activations")
            train_step(self.run, StepBatch(0, number * micro_batch_size, number, held))
        return self._tracker.peak

    @property
    def timeline(self) -> Timeline:
        """What the last step had alive, moment by moment."""
        return self._tracker.timeline


@contextmanager
def rehearse(
    checked: CheckedRecipe,
    processes: int = 1,
    shape: Shape = Shape(),  # noqa: B008
) -> Iterator[Rehearsal]:
    """A recipe's run on fake tensors. Its data is read for the shape of a sample, or is assumed to have `shape`."""
    world = FakeWorld(0, processes, 0, _CPU, processes) if processes > 1 else World(0, 1, 0, _CPU)
    builder = SurrogateBuilder(checked, world, shape)
    loaders = make_split_loaders(builder)
    examples = {"train": _largest_batch(loaders["train"])}
    for split in loaders.keys() - {"train"}:
        try:
            examples[split] = loaders[split].fetch(0, np.arange(1))  # one: those of a split may differ in size
        except DataError:
            if not builder.missing:
                raise
            examples[split] = examples["train"]  # what is assumed is too small, or of another kind
    with fake_tensors(processes) as mode, MemoryTracker() as tracker:
        run = builder.run(Path("runs"), {name: _faked(each, examples[name], mode) for name, each in loaders.items()})
        run.state.choices.channels_last = False  # which layout is the faster one makes no difference to memory
        run.freezing.train_mode(run.model)
        yield Rehearsal(run, examples["train"], mode, tracker, builder.missing)


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


def average_from_the_start(run: Run) -> None:
    """Average the weights in every step, so that the memory of the average is there at once."""
    if isinstance(run.averaging, WeightAverage):
        run.averaging.start_step, run.averaging.every_steps = 0, 1


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


def evaluate_together(run: Run, split: str, size: int, number: int) -> None:
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


def _faked(loader: SplitLoader, example: Batch, mode: FakeTensorMode) -> SplitLoader:
    """The loader, whose batches are the example's samples again and again; random numbers and a sample are real."""
    draw, read = loader._draw, loader.dataset.read

    def read_real(index: int) -> Sample:
        with unset_fake_temporarily():
            return read(index)

    def draw_real(batch: Batch, epoch: int, device: torch.device) -> Sequence[Tensor]:
        with unset_fake_temporarily():
            return draw(batch, epoch, device)

    loader.dataset.read = read_real  # type: ignore[method-assign]
    loader.fetch = lambda epoch, ids: _fake_batch(example, len(ids), mode)  # type: ignore[method-assign]
    loader._draw = draw_real  # type: ignore[method-assign]
    loader._draw_for_step = partial(_largest_draw, loader, example, mode)  # type: ignore[method-assign]
    return loader


def _largest_batch(loader: SplitLoader) -> Batch:
    """Samples as large as those of a step may be: where images differ in size, padded to the most extreme ones.

    Those are the tallest and the widest image, by pixels and by shape; of random sizes, the largest of a few draws.
    """
    size = len(loader.dataset)
    first = loader.fetch(0, np.arange(min(_FIRST, size)))
    find_sizes = getattr(loader.dataset, "image_sizes", None)
    if loader.padding is None or find_sizes is None:
        return first
    some = np.unique(np.linspace(0, size - 1, _DRAWS, dtype=np.int64))
    if IMAGE_SIZE not in loader.fetch(0, some):
        return first  # one size for all, as it seems
    heights, widths = np.where(find_sizes() < ANY_SIZE, find_sizes(), 1).T
    extremes = np.unique([np.argmax(each) for each in (heights, widths, heights / widths, widths / heights)])
    drawn = (loader.fetch(epoch, extremes) for epoch in range(_DRAWS))
    return max(drawn, key=lambda batch: int(batch["image"][0].numel()))


def _largest_draw(loader: SplitLoader, example: Batch, mode: FakeTensorMode, step: int, number: int) -> Tensor:
    return largest_draw(loader, number, lambda: _fake_batch(example, 1, mode))


def _fake_batch(example: Batch, size: int, mode: FakeTensorMode) -> Batch:
    """A batch of this size of fake tensors; sample numbers are real, since random numbers are drawn by them."""

    def repeat(value: Any) -> Any:
        if isinstance(value, Tensor):
            return mode.from_tensor(value).new_empty((size, *value.shape[1:]))
        return [mode.from_tensor(value[index % len(value)]) for index in range(size)]

    batch = Batch({name: repeat(value) for name, value in example.items() if name not in ("id", IMAGE_SIZE)})
    with unset_fake_temporarily():
        batch["id"] = torch.arange(size)
    return batch
