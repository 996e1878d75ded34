"""Images of different sizes in one batch: padded with zeros on the right and below, so that coordinates stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError

_IGNORED = 255  # the default `ignore_index` of losses and metrics
Sizes = Sequence[Sequence[int]]
"""Height and width of each image of a batch, without its padding."""


@dataclass(frozen=True)
class Padding:
    """How images and masks of different sizes are stacked: padded to the largest of their batch."""

    mask_fill: int = 0
    size_divisible: int = 1
    """Both sides become multiples of this number."""

    def is_needed(self, height: int, width: int) -> bool:
        """Whether images that all have this size are padded too."""
        return height % self.size_divisible > 0 or width % self.size_divisible > 0

    def stack_images(self, first: NDArray[Any], others: Sequence[NDArray[Any]]) -> tuple[Tensor, Tensor]:
        """Images [n, C, H, W] of one size and others [H, W, C] of any, as [N, C, H', W']; and their sizes [N, 2]."""
        sizes = np.array([*(each.shape[1:] for each in first), *(each.shape[:2] for each in others)], np.int64)
        height, width = -(-sizes.max(0) // self.size_divisible) * self.size_divisible
        padded = np.zeros((len(sizes), first.shape[1], height, width), first.dtype)
        padded[: len(first), :, : first.shape[2], : first.shape[3]] = first
        for place, image in zip(padded[len(first) :], others, strict=True):
            for channel, plane in zip(place, cv2.split(image), strict=True):  # several times as fast as turning axes
                channel[: plane.shape[0], : plane.shape[1]] = plane
        return torch.from_numpy(padded), torch.from_numpy(sizes)

    def stack_masks(self, masks: Sequence[NDArray[Any]], images: Tensor, sizes: Tensor) -> Tensor:
        """The masks [H, W] of such images as [N, H', W'], with the padding filled."""
        padded = np.full((len(masks), *images.shape[2:]), self.mask_fill, masks[0].dtype)
        for place, mask, (height, width) in zip(padded, masks, sizes.tolist(), strict=True):
            if mask.shape != (height, width):
                raise DataError(f"a mask of shape {list(mask.shape)} lies on an image of {width}×{height} pixels")
            place[:height, :width] = mask
        return torch.from_numpy(padded)


def padding_for(task: Any, model: Any, dataset: Any) -> Padding | None:
    """How images of different sizes are stacked; None unless the task pads images and the model takes padded ones.

    A model says that by `pads_images`, and by `size_divisible` that sides must be multiples of a number.
    """
    if not (getattr(task, "pads_images", False) and getattr(model, "pads_images", True)):
        return None
    ignored = getattr(dataset, "ignore_index", None)
    fill = 0 if len(dataset.classes) < 2 else _IGNORED if ignored is None else ignored
    return Padding(fill, int(getattr(model, "size_divisible", 1)))


def clear_padding(images: Tensor, sizes: Sizes) -> None:
    """Set the padding of images [N, C, H, W] to zero, in place."""
    for image, (height, width) in zip(images, sizes, strict=True):
        image[:, height:] = 0
        image[:, :height, width:] = 0


def inside_sizes(sizes: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """Which pixels of planes of `shape` are no padding, bool [N, H, W], given the sizes [N, 2] on the host."""
    heights, widths = sizes.to(device, non_blocking=True).unbind(1)
    rows, columns = (torch.arange(length, device=device) for length in shape)
    return (rows < heights[:, None])[:, :, None] & (columns < widths[:, None])[:, None, :]


def flip_planes(planes: Tensor, sizes: Sizes | None) -> Tensor:
    """Planes [N, C, H, W] flipped left and right, each within its own width; the padding becomes zero."""
    if sizes is None:
        return planes.flip(-1)
    flipped = torch.zeros_like(planes)
    for place, plane, (height, width) in zip(flipped, planes, sizes, strict=True):
        place[:, :height, :width] = plane[:, :height, :width].flip(-1)
    return flipped
