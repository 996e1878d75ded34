"""Samples put together as a batch, each written to its place as soon as it is ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import LISTED, Batch, Sample
from paceline.data.sample_types import Image, as_image

Ids = NDArray[np.int64]


class Collator:
    """Room for a number of samples whose images have one size and type, which the first one tells."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._ids: list[int] = []
        self._fields: dict[str, list[Any]] = {}
        self._images: Image = np.empty(0, np.uint8)
        self._shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, index: int, sample: Sample) -> None:
        """Put sample `index` behind those that are here; nothing of it is needed afterwards."""
        image = as_image(sample["image"])
        if not self._ids:
            self._shape = image.shape
            self._images = np.empty((self._room, *_channels_first(image.shape)), image.dtype)
            self._fields = {name: [] for name in sample}
        elif image.dtype != self._images.dtype:
            raise DataError(
                f"samples {self._ids[0]} and {index} differ in type ({self._images.dtype} and {image.dtype}), so they"
                " cannot be stacked; have the data set give all images as uint8, or all as float32"
            )
        elif image.shape != self._shape:
            raise DataError(
                f"samples {self._ids[0]} and {index} differ in size ({_size(self._shape)} and {_size(image.shape)}), so"
                " they cannot be stacked; add a transform that gives one size, such as"
                " {name: resize, size: [224, 224]}"
            )
        _write(image, self._images[len(self._ids)])
        self._ids.append(index)
        for name, values in self._fields.items():
            if name != "image":
                values.append(sample[name])

    def batch(self) -> Batch:
        """The samples: images [N, C, H, W] or [N, C, T, H, W], numbers as int64 [N], arrays stacked, objects listed."""
        fields: dict[str, Any] = {"id": torch.tensor(self._ids)}
        for name, values in self._fields.items():
            if name == "image":
                fields[name] = torch.from_numpy(self._images[: len(self._ids)])
            else:
                fields[name] = [_tensor(value) for value in values] if name in LISTED else self._stacked(name, values)
        return Batch(fields)

    def _stacked(self, name: str, values: list[Any]) -> Tensor:
        if isinstance(values[0], int):
            return torch.tensor(values)
        try:
            return torch.from_numpy(np.stack(values))
        except (ValueError, TypeError) as error:
            shapes = [list(np.shape(value)) for value in values]
            other = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), 0)
            raise DataError(
                f"samples {self._ids[0]} and {self._ids[other]} have {name} of shapes {shapes[0]} and {shapes[other]},"
                " which cannot be stacked; have the data set give numbers of one shape"
            ) from error


def stack(ids: Iterable[int], samples: Iterable[Sample]) -> Batch:
    """Samples of one size as a batch."""
    numbered = list(zip(ids, samples, strict=True))
    together = Collator(len(numbered))
    for index, sample in numbered:
        together.add(int(index), sample)
    return together.batch()


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[H, W, C] becomes [C, H, W], and [..., T, H, W, C] becomes [..., C, T, H, W]."""
    frame = min(len(shape) - 1, 3)
    return *shape[: -frame - 1], shape[-1], *shape[-frame - 1 : -1]


def _write(image: Image, place: Image) -> None:
    """Copy an image, or the frames of a video, to a place of the same type with the channels first."""
    if image.ndim > 4:
        for part, part_of_place in zip(image, place, strict=True):
            _write(part, part_of_place)
    elif place.shape[0] == 1:
        np.copyto(place[0], image[..., 0])
    else:  # several times as fast as turning the axes of whole batches
        width, channels = image.shape[-2:]
        planes = place.reshape(channels, -1, width)
        cv2.split(image.reshape(-1, width, channels), list(planes))  # of other types it would write elsewhere


def _tensor(value: NDArray[Any]) -> Tensor:
    # Of its own, contiguous and writable: what a data set keeps in memory must not be shared with a model.
    return torch.from_numpy(np.array(value))


def _size(shape: tuple[int, ...]) -> str:
    height, width = shape[-3:-1]
    frames = f"{shape[-4]} × " if len(shape) > 3 else ""
    return f"{frames}{width}×{height}"
