"""What it takes to know which sample comes next among a billion."""

from __future__ import annotations

import random
import statistics
import tracemalloc
from time import perf_counter

from benchmarks.report import Section, at_most
from paceline.data.sampler import Permutation

SIZE, BATCH = 10**9, 128
MEGABYTES, MILLISECONDS = 1.0, 1.0


def measure(is_quick: bool) -> Section:
    """Memory, the time to resume at any place, and speed."""
    resumes, batches = (50, 1_000) if is_quick else (500, 20_000)
    resume = [_resume(random.Random(number)) for number in range(resumes)]
    median, slowest = statistics.median(resume) * 1e3, max(resume) * 1e3
    memory, speed = _peak_megabytes(), _samples_per_second(batches)
    return Section(
        "Shuffling a billion samples",
        f"`Permutation` of {SIZE:,} samples: peak memory; the time to create it and read a batch at a random position"
        f" of a random epoch ({resumes} times); and the speed of reading batches of {BATCH} in order.",
        ["metric", "value"],
        [
            ["peak memory", f"{memory:.2f} MB"],
            ["resume, median", f"{median:.2f} ms"],
            ["resume, slowest", f"{slowest:.2f} ms"],
            ["samples/s in order", f"{speed:,.0f}"],
        ],
        [
            at_most("memory of a permutation", memory, MEGABYTES, "{:.2f} MB", is_ratio=False),
            at_most("resume anywhere", median, MILLISECONDS, "{:.2f} ms", is_ratio=False),
        ],
    )


def _resume(rng: random.Random) -> float:
    epoch, start = rng.randrange(1000), rng.randrange(SIZE - BATCH)
    begin = perf_counter()
    Permutation(SIZE, seed=0).at(epoch, start, start + BATCH)
    return perf_counter() - begin


def _peak_megabytes() -> float:
    tracemalloc.start()
    order = Permutation(SIZE, seed=0)
    for start in range(0, 100 * BATCH, BATCH):
        order.at(3, start, start + BATCH)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20


def _samples_per_second(batches: int) -> float:
    order = Permutation(SIZE, seed=0)
    begin = perf_counter()
    for start in range(0, batches * BATCH, BATCH):
        order.at(0, start, start + BATCH)
    return batches * BATCH / (perf_counter() - begin)
