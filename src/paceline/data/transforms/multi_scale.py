"""Batches of another size at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from paceline.core.registry import register
from paceline.data.argument_types import Size
from paceline.data.transforms.batch_objects import has_objects, retrace, scale


@register.transform("multi_scale")
@dataclass(frozen=True)
class MultiScale:
    """Resize to one of `sizes`, each as likely: the same for all that a step computes, in every process.

    Images are interpolated and averaged where they shrink; masks keep their values; boxes and keypoints follow.
    """

    sizes: Annotated[Sequence[Size], Field(min_length=1)]
    draws: ClassVar[int] = 1
    is_batch: ClassVar[bool] = True
    per_step: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        """The batch at the size that `draws` [1, 1], on the host, says."""
        size = self.sizes[int(float(draws[0, 0]) * len(self.sizes))]
        height, width = (size, size) if isinstance(size, int) else size
        images = batch["image"]
        before = images.shape[-2:]
        if before == (height, width):
            return batch
        result = {**batch, "image": _smooth(images, height, width)}
        if "mask" in batch:
            result["mask"] = _nearest(batch["mask"], height, width)
        across, down = width / before[1], height / before[0]
        if "matrix" in batch:
            matrices = batch["matrix"]
            scales = matrices.new_tensor([[across, down]])
            result["matrix"] = retrace(matrices, scales, torch.zeros_like(scales))
        if has_objects(batch):
            result |= scale(batch, across, down, lambda masks: _nearest(masks, height, width))
        return result


def _smooth(images: Tensor, height: int, width: int) -> Tensor:
    planes = images.flatten(1, -3) if images.ndim == 5 else images
    # Only processors have a kernel for whole pixels, several times as fast as that for floats; it takes planes that are
    # one pixel wide for others.
    is_fitting = images.device.type == "cpu" and 1 not in (*images.shape[-2:], height, width)
    is_converted = not images.is_floating_point() and not is_fitting
    # Averaging costs nothing: the kernels of torch are as fast with as without it.
    resized = F.interpolate(
        planes.float() if is_converted else planes, (height, width), mode="bilinear", antialias=True
    )
    if is_converted:
        resized = resized.round_().clamp_(0, 255).to(images.dtype)
    return resized.view(*images.shape[:-2], height, width)


def _nearest(planes: Tensor, height: int, width: int) -> Tensor:
    """Planes [N, H, W] whose values must not be blended."""
    if not len(planes):
        return planes.new_empty(0, height, width)
    # "nearest" would take a pixel's corner for its middle, and so move everything by half a pixel.
    return F.interpolate(planes.unsqueeze(1), (height, width), mode="nearest-exact").squeeze(1)
