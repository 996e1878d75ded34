"""Batches decoded and transformed by NVIDIA DALI, in the sampler's order and with our own random draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.core.errors import DataError
from paceline.data.autotune import usable_cores
from paceline.data.batch import Batch, Sample, as_arrays, collate
from paceline.data.dali_operators import find_refusal, make_pipeline, make_plan
from paceline.data.io.image import Encoded
from paceline.data.rng import uniforms_of_streams
from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import Request, SplitLoader

_READERS = 2  # threads that read files
_AHEAD = 4  # requests whose files are read ahead
_PIXEL = np.zeros((1, 1, 1), np.uint8)
_END_OF_JPEG, _TAIL = b"\xff\xd9", 1024  # some programs write something behind the end


def load_by_dali(
    source: SplitLoader, requests: Iterable[Request], threads: int | None = None, device: torch.device | None = None
) -> Iterator[Batch]:
    """A batch for each request, in order, with the samples that `source.fetch` gives; pixels may differ a little.

    On a CUDA device images are decoded there; by default `threads`, a thread a core, do it on the host. What DALI
    cannot do as we do it (all but upright JPEG files in colors) and what is damaged is left to `source.fetch`.
    """
    refusal = find_refusal(source)
    if refusal is not None:
        raise DataError(refusal.reason)
    return _Loading(source, threads or usable_cores(), device or torch.device("cpu")).batches(requests)


class _Read(NamedTuple):
    """A request whose files are read."""

    request: Request
    fields: Batch
    """All but the images."""
    inputs: dict[str, list[NDArray[Any]]]
    """What DALI is fed."""
    mine: NDArray[np.bool_]
    """Which samples that is."""
    others: Batch | None
    """The images of the other samples."""


class _Loading:
    def __init__(self, source: SplitLoader, threads: int, device: torch.device) -> None:
        self.source, self.threads, self.device = source, threads, device
        self.opened: Callable[[int], Sample] = source.dataset.open  # type: ignore[attr-defined]
        self._pipeline: Any = None
        self._capacity = 0

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """DALI works on one request while the one before is used and the next ones are read."""
        remaining = iter(requests)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="reader") as pool:
            ahead = deque(pool.submit(self._read, request) for request in islice(remaining, _AHEAD))
            try:
                running = self._start(ahead)
                while running is not None:
                    batch = self._collect(running)
                    ahead.extend(pool.submit(self._read, request) for request in islice(remaining, 1))
                    running = self._start(ahead)
                    yield batch
            finally:
                for future in ahead:
                    future.cancel()
                self._pipeline = None

    def _read(self, request: Request) -> _Read | Batch | Exception:
        """A request that is ready for DALI, or else its answer, which may be an error to be raised in its turn."""
        try:
            try:
                samples = [as_arrays(self.opened(index)) for index in request.ids.tolist()]
            except UNREADABLE:  # the ordinary way names it, or leaves it out
                return self.source.fetch(request.epoch, request.ids)
            return self._planned(request, samples) or self.source.fetch(request.epoch, request.ids)
        except Exception as error:  # noqa: BLE001 - raised again when it is this request's turn
            return error

    def _planned(self, request: Request, samples: list[Sample]) -> _Read | None:
        """What DALI needs; None if it has nothing to do, or not all samples can be had in one size."""
        mine = np.array([_is_for_dali(sample["image"]) for sample in samples])
        others = None if mine.all() else self.source.fetch(request.epoch, request.ids[~mine])
        if not mine.any() or (others is not None and (others.skipped or others["image"].dtype != torch.uint8)):
            return None
        draws = self._draws(request)
        planned = []
        for place in np.flatnonzero(mine):
            image: Encoded = samples[place]["image"]
            planned.append(make_plan(self.source.sample_transforms, image.height, image.width, draws[place]))
        sizes = {each.size for each in planned} | (set() if others is None else {tuple(others["image"].shape[-2:])})
        if len(sizes) > 1:
            return None
        inputs = {"data": [np.frombuffer(samples[place]["image"].data, np.uint8) for place in np.flatnonzero(mine)]}
        for name in planned[0].numbers:
            inputs[name] = [each.numbers[name] for each in planned]
        # All fields but the images are stacked already: without their files, what waits takes little memory.
        fields = collate(request.ids, [{**sample, "image": _PIXEL} for sample in samples])
        return _Read(request, fields, inputs, mine, others)

    def _draws(self, request: Request) -> NDArray[np.float64]:
        wanted = [transform.draws for transform in self.source.sample_transforms]
        if not any(wanted):
            return np.empty((len(request.ids), 0))
        return uniforms_of_streams(self.source.seed, request.epoch, request.ids, 0, wanted)

    def _start(self, ahead: deque[Future[_Read | Batch | Exception]]) -> _Read | Batch | Exception | None:
        """The next request, with DALI at work on it; None after the last."""
        if not ahead:
            return None
        read = ahead.popleft().result()
        if isinstance(read, _Read):
            count = len(read.inputs["data"])
            if self._pipeline is None or count > self._capacity:
                self._capacity = max(count, self._capacity)
                index = None if self.device.type == "cpu" else self.device.index or 0
                self._pipeline = make_pipeline(self.source.sample_transforms, self._capacity, self.threads, index)
            for name, values in read.inputs.items():
                self._pipeline.feed_input(name, values)
            self._pipeline.schedule_run()
        return read

    def _collect(self, read: _Read | Batch | Exception) -> Batch:
        if isinstance(read, Exception):
            raise read
        if isinstance(read, Batch):
            return read
        try:
            (images,) = self._pipeline.share_outputs()
            decoded: Tensor = from_dlpack(images.as_tensor())  # it keeps the memory, which DALI does not reuse
            self._pipeline.release_outputs()
        except RuntimeError:  # a damaged file, most likely: the ordinary way names it, or leaves it out
            self._pipeline = None
            return self.source.fetch(read.request.epoch, read.request.ids)
        batch = read.fields
        batch["image"] = decoded if read.others is None else _merged(read.mine, decoded, read.others["image"])
        return batch


def _is_for_dali(image: Any) -> bool:
    """Whether it is a JPEG file that DALI decodes as we do; one without an end is left to us, who notice."""
    if not isinstance(image, Encoded) or not image.header.by_simplejpeg:
        return False
    return _END_OF_JPEG in image.data[-_TAIL:]


def _merged(mine: NDArray[np.bool_], decoded: Tensor, others: Tensor) -> Tensor:
    """Images of both kinds, each in its place."""
    images = decoded.new_empty(len(mine), *decoded.shape[1:])
    is_decoded = torch.from_numpy(mine).to(decoded.device)
    images[is_decoded] = decoded
    images[~is_decoded] = others.to(decoded.device)
    return images
