"""Batches decoded and transformed by NVIDIA DALI, in the sampler's order and with our own random draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.core.errors import DataError, missing_extra
from paceline.core.process import num_cores
from paceline.core.threads import map_in_order
from paceline.data.batch import Batch, Sample, as_arrays, collate
from paceline.data.io.image import Encoded
from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import Request, SplitLoader, TransformPipeline
from paceline.data.transforms.base import OnSamples, SampleTransform, name_of
from paceline.data.transforms.functional import Draws, height_and_width

_READERS = 2  # threads, of which one reads files while DALI works for the other
_AHEAD = 4  # requests that are worked on ahead
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
    loader = _Loader(source, threads or num_cores(), device or torch.device("cpu"))
    return map_in_order(loader.fetch, requests, _READERS, _AHEAD)


class _Loader:
    """Reads, decodes and transforms samples; several threads read, and take turns with DALI."""

    def __init__(self, source: SplitLoader, threads: int, device: torch.device) -> None:
        self.source, self.threads, self.device = source, threads, device
        self.opened: Callable[[int], Sample] = source.dataset.open  # type: ignore[attr-defined]
        self._draws = TransformPipeline(source.dataset, source.sample_transforms, source.seed).draw
        self._stages = _stages(source.sample_transforms)
        self._lock, self._capacity = Lock(), 0
        self._pipeline: Any = None

    def fetch(self, request: Request) -> Batch:
        """The samples of a request; the ordinary way names what is wrong with them, or leaves it out."""
        try:
            samples = [as_arrays(self.opened(index)) for index in request.ids.tolist()]
        except UNREADABLE:
            samples = []
        return self._decoded(request, samples) or self.source.fetch(request.epoch, request.ids)

    def _decoded(self, request: Request, samples: list[Sample]) -> Batch | None:
        """None if DALI has nothing to do, cannot do it, or not all samples can be had in one size."""
        mine = np.array([_is_for_dali(sample["image"]) for sample in samples], np.bool_)
        if not mine.any():
            return None
        others = None if mine.all() else self.source.fetch(request.epoch, request.ids[~mine])
        if others is not None and (others.skipped or others["image"].dtype != torch.uint8):
            return None
        draws = self._draws(request.epoch, request.ids)
        images = {place: samples[place]["image"] for place in np.flatnonzero(mine)}
        planned = [_plan(self._stages, image.height, image.width, draws[place]) for place, image in images.items()]
        sizes = {size for _, size in planned} | (set() if others is None else {tuple(others["image"].shape[-2:])})
        if len(sizes) > 1:
            return None
        batch = collate(request.ids, [{**sample, "image": _PIXEL} for sample in samples])
        self.source.check(batch)
        inputs = {"data": [np.frombuffer(image.data, np.uint8) for image in images.values()]}
        inputs |= {name: [numbers[name] for numbers, _ in planned] for name in planned[0][0]}
        decoded = self._run(inputs)
        if decoded is None:
            return None
        batch["image"] = decoded if others is None else _merged(mine, decoded, others["image"])
        return batch

    def _run(self, inputs: dict[str, list[NDArray[Any]]]) -> Tensor | None:
        """What DALI gives; None if it stumbles over a file, a damaged one most likely."""
        count = len(inputs["data"])
        with self._lock:
            if self._pipeline is None or count > self._capacity:
                self._capacity = max(count, self._capacity)
                index = None if self.device.type == "cpu" else self.device.index or 0
                self._pipeline = make_pipeline(self._stages, self._capacity, self.threads, index)
            for name, values in inputs.items():
                self._pipeline.feed_input(name, values)
            try:
                (images,) = self._pipeline.run()
            except RuntimeError:
                self._pipeline = None
                return None
            decoded: Tensor = from_dlpack(images.as_tensor())  # it keeps the memory, which DALI does not reuse
            return decoded


def _is_for_dali(image: Any) -> bool:
    """Whether it is a JPEG file that DALI decodes as we do, upright; one without an end is left to us, who notice."""
    if not isinstance(image, Encoded) or not image.by_simplejpeg or image.orientation != 1:
        return False
    return _END_OF_JPEG in image.data[-_TAIL:]


def _merged(mine: NDArray[np.bool_], decoded: Tensor, others: Tensor) -> Tensor:
    """Images of both kinds, each in its place."""
    images = decoded.new_empty(len(mine), *decoded.shape[1:])
    is_decoded = torch.from_numpy(mine).to(decoded.device)
    images[is_decoded] = decoded
    images[~is_decoded] = others.to(decoded.device)
    return images


Numbers = dict[str, NDArray[Any]]
"""What the operators are fed for one sample, by name."""

_AS_IT_LIES = {"adjust_orientation": False}  # it reads some Exif data otherwise than we do
_IN_PIXELS = {"axis_names": "HW", "normalized_anchor": False, "normalized_shape": False}
_ALLOWED = {"image", "label", "size", "image_id"}  # fields that a change of the image does not touch


class Refusal(NamedTuple):
    """Why DALI cannot load a split."""

    key: str | None
    """The key of the split that is to blame; None for `data.loader` itself."""
    reason: str


def find_refusal(loader: SplitLoader) -> Refusal | None:
    """Why DALI cannot load the split of a loader; None if it can."""
    if missing := missing_extra("dali"):
        return Refusal(None, f"{missing}, or use data.loader: auto")
    if loader.in_memory or not hasattr(loader.dataset, "open"):
        found = type(loader.dataset).__name__
        return Refusal("dataset", f"{found} has no image files, which data.loader: dali decodes; use data.loader: auto")
    for index, transform in enumerate(loader.sample_transforms):
        name = name_of(transform)
        if name not in _STAGES:
            reason = f"data.loader: dali does {', '.join(_STAGES)} and all batch transforms, not {name}"
            return Refusal(f"transforms.{index}", f"{reason}; remove it, or use data.loader: auto")
        if name == "random_rotation" and len(np.unique(_plain(transform).fill)) > 1:
            return Refusal(f"transforms.{index}.fill", "data.loader: dali fills all channels with one value; give one")
    try:
        more = sorted(loader.dataset.open(0).keys() - _ALLOWED)
    except UNREADABLE:  # named when it is loaded
        return None
    if more:
        reason = f"its samples have {', '.join(more)}, and data.loader: dali only transforms images"
        return Refusal("dataset", f"{reason}; use data.loader: auto")
    return None


def _plan(stages: Sequence[Any], height: int, width: int, draws: Draws) -> tuple[Numbers, tuple[int, int]]:
    """What the operators are fed for an image of that size, from its row of draws, and the size that it comes to."""
    numbers: Numbers = {}
    for stage in stages:
        number = stage.transform.draws
        own, (height, width) = stage.plan(height, width, draws[:number])
        numbers |= {stage.input(name): value for name, value in own.items()}
        draws = draws[number:]
    return numbers, (height, width)


def make_pipeline(stages: Sequence[Any], capacity: int, threads: int, device_id: int | None) -> Any:
    """A DALI pipeline that is fed "data", the bytes of JPEG files, and the numbers; it gives uint8 [N, C, H, W].

    With a device it decodes and works there, else on the host.
    """
    from nvidia.dali import Pipeline, types
    from nvidia.dali import fn as operators

    fn: Any = operators
    pipeline = Pipeline(capacity, threads, device_id, prefetch_queue_depth=1)
    kinds = {"u1": types.UINT8, "i4": types.INT32, "f4": types.FLOAT}

    def given(name: str, kind: str, dims: int) -> Any:
        return fn.external_source(name=name, dtype=kinds[kind], ndim=dims)

    with pipeline:
        data, device = given("data", "u1", 1), "cpu" if device_id is None else "mixed"
        if stages and isinstance(stages[0], _RandomResizedCrop):  # no more is decoded than that
            images = fn.decoders.image_slice(data, *stages[0].box(given), device=device, **_IN_PIXELS, **_AS_IT_LIES)
            images, stages = stages[0].resize(fn, images), stages[1:]
        else:
            images = fn.decoders.image(data, device=device, **_AS_IT_LIES)
        for stage in stages:
            images = stage.apply(fn, images, given)
        pipeline.set_outputs(fn.transpose(images, perm=[2, 0, 1]))
    pipeline.build()
    return pipeline


Given = Callable[[str, str, int], Any]
Planned = tuple[Numbers, tuple[int, int]]


@dataclass(frozen=True)
class _Stage:
    """One transform of a pipeline."""

    transform: Any
    place: int

    def input(self, name: str) -> str:
        return f"{name} {self.place}"

    def box(self, given: Given) -> tuple[Any, Any]:
        return given(self.input("anchor"), "i4", 1), given(self.input("shape"), "i4", 1)


class _Resize(_Stage):
    def plan(self, height: int, width: int, draws: Draws) -> Planned:
        size = self.transform.target(height, width)
        return {"size": np.array(size, np.float32)}, size

    def apply(self, fn: Any, images: Any, given: Given) -> Any:
        return fn.resize(images, size=given(self.input("size"), "f4", 1))


class _CenterCrop(_Stage):
    def plan(self, height: int, width: int, draws: Draws) -> Planned:
        return _as_numbers(self.transform.box(height, width)), height_and_width(self.transform.size)

    def apply(self, fn: Any, images: Any, given: Given) -> Any:
        fill = [float(each) for each in np.atleast_1d(self.transform.fill)]
        return fn.slice(images, *self.box(given), **_IN_PIXELS, out_of_bounds_policy="pad", fill_values=fill)


class _RandomResizedCrop(_Stage):
    def plan(self, height: int, width: int, draws: Draws) -> Planned:
        return _as_numbers(self.transform.box(height, width, draws)), height_and_width(self.transform.size)

    def apply(self, fn: Any, images: Any, given: Given) -> Any:
        return self.resize(fn, fn.slice(images, *self.box(given), **_IN_PIXELS))

    def resize(self, fn: Any, images: Any) -> Any:
        return fn.resize(images, size=list(height_and_width(self.transform.size)))


class _RandomHorizontalFlip(_Stage):
    def plan(self, height: int, width: int, draws: Draws) -> Planned:
        return {"flip": np.array(draws[0] < self.transform.p, np.int32)}, (height, width)

    def apply(self, fn: Any, images: Any, given: Given) -> Any:
        return fn.flip(images, horizontal=given(self.input("flip"), "i4", 0))


class _RandomRotation(_Stage):
    def plan(self, height: int, width: int, draws: Draws) -> Planned:
        return {"matrix": self.transform.matrix(height, width, draws).astype(np.float32)}, (height, width)

    def apply(self, fn: Any, images: Any, given: Given) -> Any:
        fill = float(np.atleast_1d(self.transform.fill)[0])
        return fn.warp_affine(images, matrix=given(self.input("matrix"), "f4", 2), inverse_map=False, fill_value=fill)


def _as_numbers(box: Sequence[float]) -> Numbers:
    return {"anchor": np.array(box[:2], np.int32), "shape": np.array(box[2:], np.int32)}


_STAGES: dict[str, type[_Stage]] = {
    "resize": _Resize,
    "center_crop": _CenterCrop,
    "random_resized_crop": _RandomResizedCrop,
    "random_horizontal_flip": _RandomHorizontalFlip,
    "random_rotation": _RandomRotation,
}


def _stages(transforms: Sequence[SampleTransform]) -> list[Any]:
    return [_STAGES[name_of(each)](_plain(each), place) for place, each in enumerate(transforms)]


def _plain(transform: SampleTransform) -> Any:
    return transform.transform if isinstance(transform, OnSamples) else transform
