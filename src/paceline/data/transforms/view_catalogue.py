"""The transforms of evaluation that recipes can name: what is kept, and what is looked at several times."""

from __future__ import annotations

from paceline.core.arguments import Arguments, Count
from paceline.core.registry import NoArguments, register

_transforms = register.kind("transform")


class MultiCropArguments(Arguments):
    """Arguments of `multi_crop`."""

    size: Count
    crops: Count = 3


_transforms.add(
    "keep_truth",
    "paceline.data.transforms.keep_truth:KeepTruth",
    NoArguments,
    "keep the mask as it is here, to measure and save predictions at its size",
)
_transforms.add(
    "multi_crop",
    "paceline.data.transforms.multi_crop:MultiCrop",
    MultiCropArguments,
    "cut squares along the longer side of a clip, as views of one sample",
)
