"""What NVIDIA DALI does of a recipe: its operators, and the numbers that our keyed draws make for them.

Where a sample is cut, to what size it comes and whether it is mirrored is computed here, as the transforms compute it,
and handed to the operators as inputs: nothing is drawn by DALI itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.transforms.geometry import middle
from paceline.data.transforms.kinds import SampleTransform
from paceline.data.transforms.sample_transforms import CenterCrop, Mirror, RandomResizedCrop, Resize, height_and_width

SUPPORTED = (Resize, CenterCrop, RandomResizedCrop, Mirror)
_IN_PIXELS = {"axis_names": "HW", "normalized_anchor": False, "normalized_shape": False}
_NAMES = "resize, center_crop, random_resized_crop and mirror"

Numbers = dict[str, NDArray[Any]]
"""The inputs of the operators for one sample, by name."""


class Planned(NamedTuple):
    """What is to be done to one sample, and the height and width that it comes to."""

    numbers: Numbers
    size: tuple[int, int]


def refuse_others(transforms: Sequence[SampleTransform]) -> None:
    """Raise a DataError that names the first transform of single samples that DALI is not asked to do."""
    for transform in transforms:
        if not isinstance(transform, SUPPORTED):
            raise DataError(
                f"data.loader: dali does {_NAMES}, and all transforms of whole batches, but not"
                f" {type(transform).__name__}; take it out of the recipe, or use data.loader: auto"
            )


def plan(transforms: Sequence[SampleTransform], height: int, width: int, draws: NDArray[np.float64]) -> Planned:
    """The numbers for an image of that size, from its row of draws for all transforms."""
    numbers: Numbers = {}
    used = 0
    for place, transform in enumerate(transforms):
        own = draws[used : used + transform.draws]
        used += transform.draws
        if isinstance(transform, RandomResizedCrop):
            top, left, *part = transform.box(height, width, own)
            numbers |= _window(place, (top, left), (part[0], part[1]))
            height, width = height_and_width(transform.size)
        elif isinstance(transform, CenterCrop):
            wanted = height_and_width(transform.size)
            numbers |= _window(place, (middle(height, wanted[0]), middle(width, wanted[1])), wanted)
            height, width = wanted
        elif isinstance(transform, Resize):
            height, width = transform.target(height, width)
            numbers[f"size {place}"] = np.array([height, width], np.float32)
        elif isinstance(transform, Mirror):
            numbers[f"mirror {place}"] = np.array(own[0] < transform.chance, np.int32)
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
        for place, transform in enumerate(transforms):
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
            elif isinstance(transform, Mirror):
                images = fn.flip(images, horizontal=given(f"mirror {place}", types.INT32, 0))
        made.set_outputs(fn.transpose(images, perm=[2, 0, 1]))
    made.build()
    return made


def _window(place: int, anchor: tuple[int, int], shape: tuple[int, int]) -> Numbers:
    return {f"anchor {place}": np.array(anchor, np.int32), f"shape {place}": np.array(shape, np.int32)}
