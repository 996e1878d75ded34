"""Work done ahead by threads, with its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_order(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int) -> Iterator[R]:
    """What `work` gives for each item, in order, computed ahead by threads, which end with the iterator."""
    remaining = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="loader") as pool:
        waiting = deque(pool.submit(work, item) for item in islice(remaining, ahead))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(work, item) for item in islice(remaining, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()
