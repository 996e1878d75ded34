"""The metrics of classes of pixels that recipes can name; the number of classes is supplied when they are built."""

from __future__ import annotations

from paceline.core.arguments import Arguments, NonNegative
from paceline.core.registry import register


class SegmentationArguments(Arguments):
    """Arguments of segmentation."""

    pass


class BoundaryFArguments(SegmentationArguments):
    """Arguments of boundary_f."""

    distance: NonNegative | None = None


_metrics = register.kind("metric")
_metrics.add(
    "segmentation",
    "paceline.metrics.segmentation:Segmentation",
    SegmentationArguments,
    "mean and per-class intersection over union, and accuracies, of pixels",
)
_metrics.add(
    "boundary_f",
    "paceline.metrics.boundary:BoundaryF",
    BoundaryFArguments,
    "F1 of boundary pixels within a distance, averaged over images and classes",
)
