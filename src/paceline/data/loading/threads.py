"""Batches read ahead by threads: decoders and OpenCV let other threads run, and nothing has to be handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from time import perf_counter

import torch

from paceline.data.batch import Batch
from paceline.data.loading.source import Request, Source

_AHEAD = 2  # requests that each thread may have before it, the one it works on included


def load_by_threads(source: Source, requests: Iterable[Request], workers: int) -> Iterator[Batch]:
    """A batch for each request, in order, read ahead by that many threads; they end with the iterator."""
    remaining = iter(requests)
    with _pool(workers) as pool:
        ahead = deque(pool.submit(_answer, source, request) for request in islice(remaining, _AHEAD * workers + 1))
        try:
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(pool.submit(_answer, source, request) for request in islice(remaining, 1))
                yield batch
        finally:
            for future in ahead:
                future.cancel()


def read_at_once(source: Source, requests: list[Request], workers: int) -> tuple[list[Future[Batch]], float]:
    """The batches of a few requests, all read when this returns, and the seconds that it took."""
    with _pool(workers) as pool:
        begin = perf_counter()
        futures = [pool.submit(_answer, source, request) for request in requests]
        wait(futures)
        return futures, perf_counter() - begin


def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="loader")


def _answer(source: Source, request: Request) -> Batch:
    batch = source.fetch(request.epoch, request.ids)
    return batch.pin_memory() if torch.cuda.is_available() else batch
