"""Loader profile: the time that reading files, decoding them and the transforms take, measured on a few samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline.core.regular_file import open_regular
from paceline.data.batch import Sample
from paceline.data.io.image import Encoded, Pixels
from paceline.data.io.video import EncodedVideo
from paceline.data.split_loader import Dataset, SplitLoader, TransformPipeline

Bound = Literal["disk", "decode", "augment", "memory"]

_MOST_SECONDS = 3.0  # for each of the two measurements
_BATCH = 256  # samples of a batch that is taken from memory


class LoaderProfile(NamedTuple):
    """Seconds that a sample takes in one thread, by what they are spent on, and the speed of all threads together."""

    read: float
    decode: float
    transform: float
    bytes: int
    """Of its files, on average."""
    stays_in_memory: bool
    """Whether the files of the split take less than half of the machine's memory: the disk is then needed but once."""
    samples: int
    """How many were measured."""
    threads: int
    samples_per_second: float
    in_memory: bool = False

    @property
    def bound(self) -> Bound:
        """What takes most of the time."""
        if self.in_memory:
            return "memory"
        if not self.stays_in_memory and self.read > max(self.decode, self.transform):
            return "disk"
        return "decode" if self.decode >= self.transform else "augment"


def profile_loader(source: SplitLoader, ids: Sequence[int], threads: int) -> LoaderProfile:
    """The stages of loading these samples, as far as a few seconds allow.

    Files are read after the system was asked to forget them, so that the disk counts; then decoded and transformed
    from memory. The speed is that of `threads` threads which find the files in memory.
    """
    if source.in_memory:
        return _from_memory(source, ids)
    stopwatch = _Stopwatch()
    timed = TransformPipeline(_Timed(source.dataset, stopwatch), source.sample_transforms, source.seed)
    read, length, total = 0.0, 0, 0.0
    done: list[int] = []
    until = perf_counter() + _MOST_SECONDS
    for index in ids:
        seconds, size = _read_from_disk(source.dataset, index)
        read, length = read + seconds, length + size
        if not done:
            _load(timed, index)  # the first one opens libraries, and is not counted
            stopwatch.seconds = 0.0
        begin = perf_counter()
        _load(timed, index)
        total += perf_counter() - begin
        done.append(index)
        if perf_counter() > until:
            break
    number = len(done)
    decode = min(total, stopwatch.seconds)
    size = length // number
    parts = read / number, decode / number, (total - decode) / number
    is_small = size * len(source.dataset) < _memory() / 2
    return LoaderProfile(*parts, size, is_small, number, threads, _speed(source, done, threads))


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _speed(source: SplitLoader, ids: list[int], threads: int) -> float:
    plain = TransformPipeline(source.dataset, source.sample_transforms, source.seed)
    until = perf_counter() + _MOST_SECONDS
    begin, done = perf_counter(), 0
    with ThreadPoolExecutor(threads, "measuring") as pool:
        todo = iter(ids * 4)
        while perf_counter() < until and (piece := list(islice(todo, 4 * threads))):
            done += sum(1 for _ in pool.map(lambda index: _load(plain, index), piece))
    return done / (perf_counter() - begin)


def _from_memory(source: SplitLoader, ids: Sequence[int]) -> LoaderProfile:
    batches = [np.array(ids[start : start + _BATCH]) for start in range(0, len(ids), _BATCH)]
    begin = perf_counter()
    for batch in batches:
        source.fetch(0, batch)
    seconds = perf_counter() - begin
    return LoaderProfile(0.0, 0.0, 0.0, 0, True, len(ids), 1, len(ids) / seconds, in_memory=True)


def _load(pipeline: TransformPipeline, index: int) -> Sample:
    return pipeline.sample(0, index, pipeline.draw(0, np.array([index]))[0])


def _read_from_disk(dataset: Dataset, index: int) -> tuple[float, int]:
    """Seconds that the files of a sample take to read, and their bytes; none if there are no files of its own."""
    seconds, length = 0.0, 0
    for name in ("path", "mask_path"):
        find: Callable[[int], Path] | None = getattr(dataset, name, None)
        if find is None or (len(dataset) > 1 and find(0) == find(1)):  # all in one file, as in a pack
            continue
        with suppress(OSError):  # what a data set calls a path may be any name
            taken, size = _read_anew(find(index))
            seconds, length = seconds + taken, length + size
    return seconds, length


def _read_anew(path: Path) -> tuple[float, int]:
    with open_regular(path, buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = perf_counter()
        size = len(file.read())
        return perf_counter() - begin, size


class _Stopwatch:
    """Adds up the time inside of `running`, however deep."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._depth += 1
        begin = perf_counter()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += perf_counter() - begin


class _Timed:
    """A data set whose samples are decoded under a stopwatch, whoever does it."""

    def __init__(self, dataset: Dataset, stopwatch: _Stopwatch) -> None:
        self._dataset, self._stopwatch = dataset, stopwatch
        opened: Callable[[int], Sample] | None = getattr(dataset, "open", None)
        if opened is not None:
            self.open = lambda index: self._timed(opened, index)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> Sample:
        return self._timed(self._dataset.read, index)

    def _timed(self, read: Callable[[int], Sample], index: int) -> Sample:
        with self._stopwatch.running():
            sample = read(index)
        image: Any = sample["image"]
        if isinstance(image, Encoded):
            image = _TimedImage(image.path, image.data, image.header, image.max_pixels, self._stopwatch)
        elif isinstance(image, EncodedVideo):
            image = _TimedVideo(image, self._stopwatch)
        return {**sample, "image": image}


@dataclass(frozen=True, slots=True)
class _TimedImage(Encoded):
    stopwatch: _Stopwatch

    def decode(self, min_height: int = 0, min_width: int = 0) -> Pixels:
        with self.stopwatch.running():
            return Encoded.decode(self, min_height, min_width)


class _TimedVideo(EncodedVideo):
    def __init__(self, video: EncodedVideo, stopwatch: _Stopwatch) -> None:
        super().__init__(video.path, video.max_pixels, video.max_frames)
        self._stopwatch = stopwatch

    @property
    def num_frames(self) -> int:
        with self._stopwatch.running():
            return super().num_frames

    def frames(self, numbers: Any) -> Pixels:
        with self._stopwatch.running():
            return super().frames(numbers)
