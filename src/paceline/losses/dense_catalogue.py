"""The losses of pixels that recipes can name; the number of classes is supplied when they are built."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.core.arguments import Arguments, NonNegative, PartialShare, Share
from paceline.core.registry import NoArguments, register

MaskId = Annotated[int, Field(ge=0, le=255)]
"""A value of a mask."""


class _ClassPixelArguments(Arguments):
    class_weights: list[NonNegative] | None = None


class PixelCrossEntropyArguments(_ClassPixelArguments):
    """Arguments of pixel_cross_entropy."""

    label_smoothing: PartialShare = 0.0


class OhemCrossEntropyArguments(_ClassPixelArguments):
    """Arguments of ohem_cross_entropy."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    least_share: Share = 0.1
    per_image: bool = False


class OverlapArguments(_ClassPixelArguments):
    """Arguments of dice_loss and iou_loss."""

    per_image: bool = False


class ConsistencyArguments(Arguments):
    """Arguments of cel."""

    per_image: bool = False


_losses = register.kind("loss")
_losses.add(
    "pixel_cross_entropy",
    "paceline.losses.dense:PixelCrossEntropy",
    PixelCrossEntropyArguments,
    "softmax cross-entropy of each labelled pixel",
)
_losses.add(
    "ohem_cross_entropy",
    "paceline.losses.dense:OhemCrossEntropy",
    OhemCrossEntropyArguments,
    "softmax cross-entropy of each image's hard pixels",
)
_losses.add(
    "pixel_bce",
    "paceline.losses.dense:PixelBinaryCrossEntropy",
    NoArguments,
    "sigmoid cross-entropy of each pixel with a grey mask",
)
_losses.add(
    "cel",
    "paceline.losses.overlap:consistency_enhanced_loss",
    ConsistencyArguments,
    "consistency-enhanced loss of MINet, over the whole update or per image",
)
_losses.add(
    "dice_loss",
    "paceline.losses.overlap:dice_loss",
    OverlapArguments,
    "soft Dice of regions, over the whole update or per image",
)
_losses.add(
    "iou_loss",
    "paceline.losses.overlap:iou_loss",
    OverlapArguments,
    "soft intersection over union of regions, over the whole update or per image",
)
