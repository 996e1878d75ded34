"""Batches in the order of the run: one stream of requests, answered in this process or by workers.

How many workers there are is measured on the first batches. Threads start at once and need no copies, so they are
preferred wherever they run in parallel. That depends on the transforms: two threads that decode and resize are nearly
twice as fast as one; two that run plain Python are not, and then processes are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, NamedTuple

import torch

from paceline.core.intervals import Progress
from paceline.core.process import num_cores
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.prefetch import explain_dead_workers as explain_dead_workers
from paceline.data.prefetch import load_by_processes, load_by_threads, prefetch_to_device, read_at_once
from paceline.data.sampler import BatchSampler, BatchSlice, Permutation, rank_slices
from paceline.data.split_loader import Choice, SplitLoader
from paceline.data.split_loader import Request as Request

_ALONE = World(0, 1, 0, torch.device("cpu"))


@dataclass(slots=True)
class MicroBatch:
    """Micro-batch `index` of step `step`, as this process holds it before its forward pass."""

    step: int
    index: int
    epoch: int
    batch: Batch
    is_padding: bool = False
    """Whether it is only computed to keep step with other processes, and counts nothing: it is another process's, or
    stands in for samples none of which can be read."""
    transformed: Batch | None = None
    """What `batch` becomes on the device, if that was needed before the forward pass."""


class StepBatch(NamedTuple):
    """What one optimizer step is made of: all micro-batches are counted, those of this process are held."""

    step: int
    num_samples: int
    num_micro_batches: int
    micro_batches: list[MicroBatch]


def load(
    source: SplitLoader,
    requests: Iterable[Request],
    workers: int | None,
    kind: Kind = "process",
    world: World = _ALONE,
    log: Callable[[str], None] | None = None,
) -> Iterator[Batch]:
    """A batch for each request, in order: the same with any kind and number of workers, but for DALI's own pixels.

    `workers` prefetch, threads or processes; 0 is this thread alone. With None, as many are used as a measurement of
    the first requests finds useful; with `auto`, it finds the kind too. `log` gets the outcome. Data in memory is only
    read by workers if a kind is asked for.
    """
    if kind == "dali":
        from paceline.data.dali import load_by_dali

        return load_by_dali(source, requests, workers or usable_cores(world.local_size), world.device)
    if workers == 0 or kind == "memory" or (source.in_memory and kind == "auto"):
        return (source.fetch(request.epoch, request.ids) for request in requests)
    if source.uses_global_rng:  # threads would draw from the generator of the training step
        kind = "process"
    return load_autotuned(source, requests, workers, kind, log or _ignore, usable_cores(world.local_size))


def automatic_workers(source: SplitLoader, world: World) -> int:
    """0 for data in memory, else one for each core of this process's share of the machine."""
    return 0 if source.in_memory else usable_cores(world.local_size)


def _ignore(text: str) -> None:
    pass


Passes = Literal["own", "at_least_one", "equal"]
"""How many micro-batches a process computes: its own, at least one, or as many as every other."""


class _Planned(NamedTuple):
    epoch: int
    slices: list[BatchSlice]
    own: list[BatchSlice]
    padding: list[BatchSlice]


@dataclass
class TrainBatches:
    """The steps of a run from where its progress stands; iterating again goes on from there."""

    source: SplitLoader
    sampler: BatchSampler
    order: Permutation
    world: World
    progress: Progress
    workers: int | None
    """How many read ahead; None for as many as are found useful."""
    passes: Passes = "own"
    kind: Kind = "process"
    log: Callable[[str], None] | None = None
    """Gets, on the main process, how samples are loaded."""

    _last: tuple[int, _Planned | None] = (-1, None)

    def __iter__(self) -> Iterator[StepBatch]:
        steps = range(self.progress.step, self.progress.total_steps)
        with closing(self._load(steps)) as loaded:  # type: ignore[type-var]  # workers end with it
            batches = prefetch_to_device(loaded, self.world.device)
            for step in steps:
                epoch, slices, own, padding = self._plan(step)
                held = [MicroBatch(step, cut.index, epoch, next(batches)) for cut in (*own, *padding)]
                for place, each in enumerate(held):  # without a single readable sample, its own counts nothing either
                    if place >= len(own) or each.batch.is_placeholder:
                        each.is_padding = True
                yield StepBatch(step, slices[-1].stop - slices[0].start, len(slices), held)

    def load_step(self, step: int) -> StepBatch:
        """One step again, as it was."""
        again = replace(self, progress=replace(self.progress, step=step), log=None)
        again.workers = again.workers if self.kind == "dali" else 0
        with closing(iter(again)) as steps:  # type: ignore[type-var]
            return next(steps)

    def _load(self, steps: range) -> Iterator[Batch]:
        log = self.log if self.world.is_main else None
        return load(self.source, self._requests(steps), self.workers, self.kind, self.world, log)

    def _requests(self, steps: range) -> Iterator[Request]:
        for step in steps:
            epoch, _, own, padding = self._plan(step)
            for cut in (*own, *padding):
                yield Request(epoch, self.order.at(epoch, cut.start, cut.stop))

    def _plan(self, step: int) -> _Planned:
        """What this process does in a step; requests without workers ask for the same one right afterwards."""
        number, plan = self._last
        if plan is None or number != step:
            slices = self.sampler.slices(step)
            own = rank_slices(slices, self.world.rank, self.world.size)
            missing = 0
            if self.passes != "own":
                wanted = 1 if self.passes == "at_least_one" else -(-len(slices) // self.world.size)
                missing = wanted - len(own)
            plan = _Planned(self.sampler.epoch(step), slices, own, slices[-1:] * missing)
            self._last = (step, plan)
        return plan


Kind = Literal["auto", "memory", "thread", "process", "dali"]
"""What loads samples."""

_MIN_SPEEDUP = 1.4  # of two threads over one, else processes are used
_MIN_GAIN = 1.1  # of twice as many threads
_REQUESTS = 2  # that each thread reads while it is measured
_RETRIES = 2  # of a number of threads that seems no faster


def usable_cores(shared_by: int = 1) -> int:
    """The cores of this process, if `shared_by` processes share those of the machine."""
    return max(1, num_cores() // shared_by)


def load_autotuned(
    source: SplitLoader,
    requests: Iterable[Request],
    workers: int | None,
    kind: Kind,
    log: Callable[[str], None],
    cores: int,
) -> Iterator[Batch]:
    """A batch for each request, in order, by what is asked for; what is not asked for is measured first, once."""
    if kind == "process":
        return load_by_processes(source, requests, workers or cores)
    if kind == "thread" and workers is not None:
        return load_by_threads(source, requests, workers)
    if source.choice is not None:
        return _load(source, requests, source.choice)
    return _measure_and_load(source, iter(requests), WorkerTuner(workers, kind == "auto", cores), log)


def _load(source: SplitLoader, requests: Iterable[Request], choice: Choice) -> Iterator[Batch]:
    load = load_by_threads if choice.kind == "thread" else load_by_processes
    return load(source, requests, choice.workers)


class WorkerTuner:
    """Numbers of threads with their speeds, in samples a second, and what follows from them."""

    def __init__(self, asked: int | None, may_be_processes: bool, cores: int) -> None:
        self._asked = asked
        self._may_be_processes = may_be_processes
        self._cores = cores
        self._speeds: dict[int, float] = {}
        self._retries = 0

    def next(self) -> int | None:
        """How many threads to try next: one, two, four and so on, as long as more are faster.

        Others use the machine too, so a number that seems no faster is tried again.
        """
        tried = max(self._speeds, default=0)
        if tried == 0:
            return 1
        if tried > self._best or self._threads_compete:
            self._retries += 1
            return tried if self._retries <= _RETRIES else None
        if tried >= self._enough:
            return None
        self._retries = 0
        return min(2 * tried, self._enough)

    def add(self, threads: int, speed: float) -> None:
        """Record the speed of a number of threads; others slow them down at times, so the best counts."""
        self._speeds[threads] = max(speed, self._speeds.get(threads, 0.0))

    @property
    def choice(self) -> Choice:
        """The best by what was tried."""
        if self._threads_compete:
            return Choice("process", self._asked or self._cores)
        return Choice("thread", self._asked or self._best)

    def __str__(self) -> str:
        kind, workers = self.choice
        name = kind if workers == 1 else "processes" if kind == "process" else "threads"
        if kind == "thread":
            speed = self._speeds.get(workers, self._speeds[self._best])
            return f"data: {workers} {name}, {speed:,.0f} images/s"
        gain = self._speeds[2] / self._speeds[1]
        return f"data: {workers} {name}, since two threads read only {gain:.1f} × as fast as one"

    @property
    def _enough(self) -> int:
        """With a number that the recipe gives, only the kind is open."""
        return self._cores if self._asked is None else min(2, self._asked)

    @property
    def _threads_compete(self) -> bool:
        if not self._may_be_processes or 2 not in self._speeds:
            return False
        return self._speeds[2] < _MIN_SPEEDUP * self._speeds[1]

    @property
    def _best(self) -> int:
        """The fewest threads that are not much slower than more are."""
        best = 1
        for threads, speed in sorted(self._speeds.items()):
            if speed > _MIN_GAIN * self._speeds[best]:
                best = threads
        return best


def _measure_and_load(
    source: SplitLoader, requests: Iterator[Request], tuner: WorkerTuner, log: Callable[[str], None]
) -> Iterator[Batch]:
    # The first ones are slower, since files are opened and memory is taken; so they are not measured.
    for future in read_at_once(source, list(islice(requests, _REQUESTS)), _REQUESTS)[0]:
        yield future.result()
    while threads := tuner.next():
        taken = list(islice(requests, _REQUESTS * threads))
        if not taken:
            return
        futures, seconds = read_at_once(source, taken, threads)
        tuner.add(threads, sum(len(request.ids) for request in taken) / seconds)
        for future in futures:
            yield future.result()
    source.choice = tuner.choice
    log(str(tuner))
    yield from _load(source, requests, source.choice)
