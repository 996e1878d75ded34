"""Batches in the order of the run: one stream of requests, answered in this process or by workers.

Threads start at once and need no copies, and decoding and our transforms run in parallel. Data sets and transforms that
draw from generators which threads share are read by processes.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import current_thread, main_thread
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from paceline.core.errors import DataError, PacelineError
from paceline.core.intervals import Progress
from paceline.core.process import block_stop_signals, end_with_parent, num_cores
from paceline.core.temporary import share_folder
from paceline.core.threads import map_in_order
from paceline.core.torch_private import shut_down_workers
from paceline.core.world import World
from paceline.data.aspect_ratio import GroupedPermutation
from paceline.data.batch import ON_HOST, Batch, map_tensors
from paceline.data.sampler import BatchSampler, BatchSlice, Permutation, rank_slices
from paceline.data.split_loader import Request as Request
from paceline.data.split_loader import SplitLoader

Kind = Literal["auto", "memory", "thread", "process", "dali"]
"""What loads samples."""
Passes = Literal["own", "at_least_one", "equal"]
"""How many micro-batches a process computes: its own, at least one, or as many as every other."""

_ALONE = World(0, 1, 0, torch.device("cpu"))
_THREAD_PREFETCH = 2  # requests queued for each thread, the one it works on included
_PROCESS_PREFETCH = 4  # requests queued for each process
_MOST_THREADS = 16  # more get into each other's way wherever Python holds them
_MAX_EVALUATION_BATCH = 256
_EVALUATED_VALUES = 1 << 22  # pixel values, over all channels, of an evaluation batch


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
    world: World
    progress: Progress
    workers: int | None = None
    """How many read ahead; None for one for each core."""
    passes: Passes = "own"
    kind: Kind = "auto"
    order: Permutation | GroupedPermutation = None  # type: ignore[assignment]
    """The order of the samples, by default one that follows from the seed of the source."""

    _last: tuple[int, _Planned | None] = (-1, None)

    def __post_init__(self) -> None:
        self.order = self.order or Permutation(self.sampler.size, self.source.seed)  # type: ignore[truthy-bool]
        if self.source.in_memory and self.kind == "auto":
            self.workers = 0
        elif self.source.uses_global_rng and self.kind in ("auto", "thread"):
            self.kind = "process"

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
        again = replace(self, progress=replace(self.progress, step=step))
        again.workers = again.workers if self.kind == "dali" else 0
        with closing(iter(again)) as steps:  # type: ignore[type-var]
            return next(steps)

    def _load(self, steps: range) -> Iterator[Batch]:
        return load(self.source, self._requests(steps), self.workers, self.kind, self.world)

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


def load(
    source: SplitLoader,
    requests: Iterable[Request],
    workers: int | None,
    kind: Kind = "process",
    world: World = _ALONE,
) -> Iterator[Batch]:
    """A batch for each request, in order: the same with any kind and number of workers, but for DALI's own pixels.

    `workers` prefetch, threads or processes; 0 is this thread alone, None one for each core of this process's share.
    With `auto` they are threads. Data in memory is only read by workers if a kind is asked for.
    """
    cores = usable_cores(world.local_size)
    if kind == "dali":
        from paceline.data.dali import load_by_dali

        return load_by_dali(source, requests, workers or cores, world.device)
    if workers == 0 or kind == "memory" or (source.in_memory and kind == "auto"):
        return (source.fetch(request.epoch, request.ids) for request in requests)
    if kind == "process" or source.uses_global_rng:  # threads would draw from the generator of the training step
        return load_by_processes(source, requests, workers or cores)
    threads = workers or min(cores, _MOST_THREADS)
    return map_in_order(partial(_fetch, source), requests, threads, _THREAD_PREFETCH * threads + 1)


def automatic_workers(source: SplitLoader, world: World) -> int:
    """0 for data in memory, else one for each core of this process's share of the machine."""
    return 0 if source.in_memory else usable_cores(world.local_size)


def usable_cores(shared_by: int = 1) -> int:
    """The cores of this process, if `shared_by` processes share those of the machine."""
    return max(1, num_cores() // shared_by)


def automatic_batch_size(loader: SplitLoader, is_cpu: bool) -> int:
    """A power of two, 256 at most: on a CPU as many samples as the first one's size leaves in the budget of a batch.

    A CPU evaluates a batch on each core, whose activations should not leave its cache. On machines of one kind it is a
    pure function of the data, so metrics do not depend on processes or restarts.
    """
    if not is_cpu:
        return _MAX_EVALUATION_BATCH
    num_values = int(loader.fetch(0, np.arange(1))["image"].numel())
    return 1 << (min(_MAX_EVALUATION_BATCH, max(1, _EVALUATED_VALUES // num_values)).bit_length() - 1)


def _fetch(source: SplitLoader, request: Request) -> Batch:
    batch = source.fetch(request.epoch, request.ids)
    return batch.pin_memory() if torch.cuda.is_available() else batch


class _Failure(NamedTuple):
    """An error of the user's data on its way out of a worker, and the worker's traceback as text."""

    error: type[PacelineError]
    message: str
    lines: str


class _RequestDataset(TorchDataset[Batch | _Failure]):
    """Reads a request inside a worker process."""

    def __init__(self, source: SplitLoader) -> None:
        self.source = source

    def __getitem__(self, request: Request) -> Batch | _Failure:
        try:
            return self.source.fetch(request.epoch, request.ids)
        except PacelineError as error:
            return _Failure(type(error), str(error), traceback.format_exc())


def load_by_processes(source: SplitLoader, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    """A batch for each request, in order, prefetched by that many processes."""
    loader = DataLoader(
        _RequestDataset(source),
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        collate_fn=_unchanged,
        prefetch_factor=_PROCESS_PREFETCH,
        pin_memory=torch.cuda.is_available(),
        # Workers share the data set's memory and block signals as we do; from Python 3.14 on it is not the default.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        worker_init_fn=partial(_init_worker, is_main_thread=current_thread() is main_thread()),
    )
    share_folder()
    # Schedulers and terminals signal every process; a run that was asked to stop still needs its workers for a step.
    with block_stop_signals():
        answers = iter(loader)
    with explain_dead_workers():
        try:
            for answer in answers:
                if isinstance(answer, _Failure):
                    raise answer.error(answer.message) from RuntimeError(f"in a loader worker:\n{answer.lines}")
                yield answer
        except (EOFError, ConnectionError, FileNotFoundError) as error:  # memory of a dead worker cannot be received
            raise _dead_worker_error(None) from error
        finally:
            # Now, and not when it is collected: the traceback of an error would keep the iterator, whose dead worker
            # torch reports again at any later signal of a child.
            shut_down_workers(answers)


def _init_worker(worker: int, is_main_thread: bool) -> None:
    """Inside a worker, which is started with stop signals blocked: end with the process that started it.

    It obeys a SIGTERM of its parent, and is killed as soon as its parent is gone: torch would look every few seconds.
    """
    parent = os.getppid()
    if is_main_thread:
        end_with_parent(parent)

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


@contextmanager
def explain_dead_workers() -> Iterator[None]:
    """Re-raise torch's error of a dead worker as a DataError that says what to do."""
    try:
        yield
    except RuntimeError as error:
        died = re.search(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\)(?: is killed by signal: (\w+))?", str(error))
        if died is None:
            raise
        raise _dead_worker_error(died[1]) from error


def _dead_worker_error(signal_name: str | None) -> DataError:
    of_signal = f" of signal {signal_name}" if signal_name else ""
    advice = "often a lack of memory; fewer workers (data.num_workers) need less"
    return DataError(f"a loader worker died{of_signal}: the system log may say why, {advice}")


def _unchanged(batch: Any) -> Any:
    return batch


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches, copied to a CUDA device by a stream of its own; for any other device they stay where they are.

    The copy of a batch is queued while the device is still busy with the one before, and does not wait for it.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch.pin_memory().to(device)
        torch.cuda.current_stream(device).wait_stream(stream)
        for name in moved.keys() - ON_HOST:  # memory that one stream wrote is not reused until the other has read it
            map_tensors(moved[name], lambda tensor: tensor.record_stream(torch.cuda.current_stream(device)))
        yield moved
