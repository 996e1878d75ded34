"""The losses that recipes can name."""

from __future__ import annotations

from paceline.core.arguments import Arguments, NonNegative, PartialShare, Positive
from paceline.core.registry import register


class CrossEntropyArguments(Arguments):
    """Arguments of cross_entropy."""

    label_smoothing: PartialShare = 0.0
    class_weights: list[NonNegative] | None = None


class BinaryCrossEntropyArguments(Arguments):
    """Arguments of bce."""

    label_smoothing: PartialShare = 0.0
    positive_weights: list[Positive] | None = None


_losses = register.kind("loss")
_losses.add(
    "cross_entropy",
    "paceline.losses.classification:CrossEntropy",
    CrossEntropyArguments,
    "softmax cross-entropy, for one label per sample",
)
_losses.add(
    "bce",
    "paceline.losses.classification:BinaryCrossEntropy",
    BinaryCrossEntropyArguments,
    "sigmoid cross-entropy of each class by itself, for several labels per sample",
)
