"""The tasks of masks and of videos that recipes can name."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from paceline.core.arguments import Arguments, NonNegative, Positive
from paceline.core.registry import NoArguments
from paceline.data.argument_types import Size
from paceline.tasks.catalogue import ClassificationArguments, tasks


class SegmentationArguments(Arguments):
    """Arguments of `segmentation`."""

    aux_weight: NonNegative = 0.0
    flip: bool = False
    scales: Annotated[list[Positive], Field(min_length=1)] = [1.0]
    window: Size | None = None
    stride: Size | None = None

    @model_validator(mode="after")
    def _strides_within_windows(self) -> Self:
        if self.stride is None:
            return self
        if self.window is None:
            raise ValueError("stride is the way from window to window: give the size of a window as window too")
        window, stride = ([each, each] if isinstance(each, int) else each for each in (self.window, self.stride))
        if stride[0] > window[0] or stride[1] > window[1]:
            raise ValueError(f"windows of {window} that are {stride} apart leave gaps; give a smaller stride")
        return self


tasks.add(
    "saliency",
    "paceline.tasks.saliency:Saliency",
    NoArguments,
    "how much each pixel belongs to a salient object",
)
tasks.add(
    "segmentation",
    "paceline.tasks.segmentation:Segmentation",
    SegmentationArguments,
    "the class of every pixel; mirrored, at several sizes or by windows in evaluation",
)
tasks.add(
    "video",
    "paceline.tasks.video:VideoClassification",
    ClassificationArguments,
    "one label per video, or several with multi_label; one prediction from all its views",
)
