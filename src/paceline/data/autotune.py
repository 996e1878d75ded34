"""Worker auto-tuning: how many threads or processes read samples, measured on the first batches, which are used.

Threads start at once and need no copies, so they are preferred wherever they run in parallel. That depends on the
transforms: two threads that decode and resize are nearly twice as fast as one; two that run plain Python are not, and
then processes are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

from paceline.core.process import num_cores
from paceline.data.batch import Batch
from paceline.data.prefetch import load_by_processes, load_by_threads, read_at_once
from paceline.data.split_loader import Choice, Request, SplitLoader

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
