"""Losses of images that a model fills in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.losses.loss_term import LossTerm
from paceline.models.masked_autoencoder import patchify

_EPS = 1e-6


@register.loss("masked_mse")
@dataclass(frozen=True)
class MaskedMSE:
    """The mean squared error of the pixels of masked patches, as masked autoencoders minimize it."""

    normalize: Annotated[bool, Field(description="Compares patches with mean 0 and variance 1, as published.")] = True

    def count(self, batch: Batch) -> float:
        masks = masks_of(batch)
        return float(len(masks) * (masks.shape[1] - batch["visible_patches"].shape[1]))

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        masks = masks_of(batch)
        targets = patch_targets(batch["image"], masks, self.normalize)
        errors = (outputs.float() - targets.float()).square().mean(2)  # [N, L]
        return LossTerm((errors * masks).sum(), self.count(batch))


def patch_targets(images: Tensor, masks: Tensor, normalize: bool) -> Tensor:
    """The pixels [N, L, p·p·C] that a model is to predict for patches [N, L]."""
    patches = patchify(images, patch_size_of(images, masks))
    if not normalize:
        return patches
    return (patches - patches.mean(2, keepdim=True)) / (patches.var(2, keepdim=True) + _EPS).sqrt()


def patch_size_of(images: Tensor, masks: Tensor) -> int:
    """The side of a patch in pixels, given how many there are."""
    height, width = images.shape[-2:]
    return round(math.sqrt(height * width / masks.shape[1]))


def masks_of(batch: Batch) -> Tensor:
    """Which patches are masked, bool [N, L]."""
    if "patch_mask" not in batch:
        raise DataError(
            "these samples have no masked patches; add {name: random_masking, num_patches: …} to the transforms"
        )
    masks: Tensor = batch["patch_mask"]
    return masks
