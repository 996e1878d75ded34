"""Batches decoded and transformed by NVIDIA DALI, in the sampler's order and with our own random draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.core.errors import DataError
from paceline.data.autotune import usable_cores
from paceline.data.batch import Batch, Sample
from paceline.data.collate import stack
from paceline.data.io.image import Encoded
from paceline.data.rng import uniforms_of_streams
from paceline.data.sample_types import as_arrays
from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import Request, SplitLoader
from paceline.data.transforms.annotations import CropBox
from paceline.data.transforms.base import OnSamples, SampleTransform, name_of
from paceline.data.transforms.functional import height_and_width
from paceline.data.transforms.geometric import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize

_READERS = 2  # threads that read files
_AHEAD = 4  # requests whose files are read ahead
_PIXEL = np.zeros((1, 1, 1), np.uint8)
_END_OF_JPEG, _TAIL = b"\xff\xd9", 1024  # some programs write something behind the end
_ALLOWED = {"image", "label", "size", "image_id"}  # cutting an image changes nothing else of such a sample


def is_installed() -> bool:
    """Whether DALI can be imported."""
    return find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None


def load_by_dali(
    source: SplitLoader, requests: Iterable[Request], threads: int | None = None, device: torch.device | None = None
) -> Iterator[Batch]:
    """A batch for each request, in order, with the samples that `source.fetch` gives; pixels may differ a little.

    On a CUDA device images are decoded there; by default `threads`, a thread a core, do it on the host. What DALI
    cannot do as we do it (all but upright JPEG files in colors) and what is damaged is left to `source.fetch`.
    """
    if not is_installed():
        raise DataError(
            "data.loader: dali needs NVIDIA DALI, which is not installed: pip install 'paceline[dali]', or use"
            " data.loader: auto"
        )
    opened: Callable[[int], Sample] | None = getattr(source.dataset, "open", None)
    if source.in_memory or opened is None:
        raise DataError(
            f"data.loader: dali decodes image files, which {type(source.dataset).__name__} does not have; use"
            " data.loader: auto"
        )
    refuse_others(source.sample_transforms)
    return _Loading(source, opened, threads or usable_cores(), device or torch.device("cpu")).batches(requests)


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
    def __init__(
        self, source: SplitLoader, opened: Callable[[int], Sample], threads: int, device: torch.device
    ) -> None:
        self.source, self.opened, self.threads, self.device = source, opened, threads, device
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
            _check_fields(samples[0])
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
            planned.append(plan(self.source.sample_transforms, image.height, image.width, draws[place]))
        sizes = {each.size for each in planned} | (set() if others is None else {tuple(others["image"].shape[-2:])})
        if len(sizes) > 1:
            return None
        inputs = {"data": [np.frombuffer(samples[place]["image"].data, np.uint8) for place in np.flatnonzero(mine)]}
        for name in planned[0].numbers:
            inputs[name] = [each.numbers[name] for each in planned]
        # All fields but the images are stacked already: without their files, what waits takes little memory.
        fields = stack(request.ids, [{**sample, "image": _PIXEL} for sample in samples])
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
                self._pipeline = pipeline(self.source.sample_transforms, self._capacity, self.threads, index)
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


def _check_fields(sample: Sample) -> None:
    for name in sample:
        if name not in _ALLOWED:
            raise DataError(
                f"data.loader: dali is for images with labels; this data set has {name!r}, which would have to be cut"
                " as the image is; use data.loader: auto"
            )


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


SUPPORTED = (Resize, CenterCrop, RandomResizedCrop, RandomHorizontalFlip)
_IN_PIXELS = {"axis_names": "HW", "normalized_anchor": False, "normalized_shape": False}
_NAMES = "resize, center_crop, random_resized_crop and random_horizontal_flip"

Numbers = dict[str, NDArray[Any]]
"""The inputs of the operators for one sample, by name."""


class Planned(NamedTuple):
    """What is to be done to one sample, and the height and width that it comes to."""

    numbers: Numbers
    size: tuple[int, int]


def refuse_others(transforms: Sequence[SampleTransform]) -> None:
    """Raise a DataError that names the first transform of single samples that DALI is not asked to do."""
    for transform in transforms:
        if not isinstance(_plain(transform), SUPPORTED):
            raise DataError(
                f"data.loader: dali does {_NAMES}, and all transforms of whole batches, but not"
                f" {name_of(transform)}; take it out of the recipe, or use data.loader: auto"
            )


def plan(transforms: Sequence[SampleTransform], height: int, width: int, draws: NDArray[np.float64]) -> Planned:
    """The numbers for an image of that size, from its row of draws for all transforms."""
    numbers: Numbers = {}
    used = 0
    for place, transform in enumerate(map(_plain, transforms)):
        own = draws[used : used + transform.draws]
        used += transform.draws
        if isinstance(transform, RandomResizedCrop):
            numbers |= _window(place, transform.box(height, width, own))
            height, width = height_and_width(transform.size)
        elif isinstance(transform, CenterCrop):
            numbers |= _window(place, transform.box(height, width))
            height, width = height_and_width(transform.size)
        elif isinstance(transform, Resize):
            height, width = transform.target(height, width)
            numbers[f"size {place}"] = np.array([height, width], np.float32)
        elif isinstance(transform, RandomHorizontalFlip):
            numbers[f"flip {place}"] = np.array(own[0] < transform.p, np.int32)
    return Planned(numbers, (height, width))


def pipeline(transforms: Sequence[SampleTransform], capacity: int, threads: int, device_id: int | None) -> Any:
    """A DALI pipeline that is fed "data", the bytes of JPEG files, and the numbers; it gives uint8 [N, C, H, W].

    With a device it decodes and works there, else on the host.
    """
    from nvidia.dali import Pipeline, types
    from nvidia.dali import fn as operators

    fn: Any = operators
    made = Pipeline(capacity, threads, device_id, prefetch_queue_depth=1)

    def given(name: str, dtype: Any, dims: int) -> Any:
        return fn.external_source(name=name, dtype=dtype, ndim=dims)

    def window(place: int) -> tuple[Any, Any]:
        return given(f"anchor {place}", types.INT32, 1), given(f"shape {place}", types.INT32, 1)

    with made:
        data, device = given("data", types.UINT8, 1), "cpu" if device_id is None else "mixed"
        is_cut_first = bool(transforms) and isinstance(transforms[0], RandomResizedCrop)
        if is_cut_first:  # no more is decoded than that
            images = fn.decoders.image_slice(data, *window(0), device=device, **_IN_PIXELS)
        else:
            images = fn.decoders.image(data, device=device)
        for place, transform in enumerate(map(_plain, transforms)):
            if isinstance(transform, RandomResizedCrop):
                if place > 0:
                    images = fn.slice(images, *window(place), **_IN_PIXELS)
                images = fn.resize(images, size=list(height_and_width(transform.size)))
            elif isinstance(transform, CenterCrop):
                fill = [float(each) for each in np.atleast_1d(transform.fill)]
                beyond = {"out_of_bounds_policy": "pad", "fill_values": fill}
                images = fn.slice(images, *window(place), **_IN_PIXELS, **beyond)
            elif isinstance(transform, Resize):
                images = fn.resize(images, size=given(f"size {place}", types.FLOAT, 1))
            elif isinstance(transform, RandomHorizontalFlip):
                images = fn.flip(images, horizontal=given(f"flip {place}", types.INT32, 0))
        made.set_outputs(fn.transpose(images, perm=[2, 0, 1]))
    made.build()
    return made


def _plain(transform: SampleTransform) -> Any:
    return transform.transform if isinstance(transform, OnSamples) else transform


def _window(place: int, box: CropBox) -> Numbers:
    return {f"anchor {place}": np.array(box[:2], np.int32), f"shape {place}": np.array(box[2:], np.int32)}
