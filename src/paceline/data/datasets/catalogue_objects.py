"""The data sets of objects that recipes can name: boxes, outlines and joints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.core.arguments import Count, CountOrZero, NonNegative
from paceline.core.registry import register
from paceline.data.argument_types import Name
from paceline.data.catalogue import ClassNames, DrawnSplitArguments, SplitArguments

datasets = register.kind("dataset")

BadBoxes = Literal["stop", "drop", "clip"]
Pairs = list[Annotated[list[CountOrZero], Field(min_length=2, max_length=2)]]


class VocArguments(SplitArguments):
    """Arguments of `voc`."""

    root: Name
    classes: ClassNames | None = None
    bad_boxes: BadBoxes = "clip"
    follow_links: bool = False
    max_pixels: Count = 100_000_000


class CocoArguments(DrawnSplitArguments):
    """Arguments of `coco`."""

    root: Name
    annotations: Name
    images: Name = "images"
    classes: ClassNames | None = None
    masks: bool = False
    keypoints: bool = False
    keep_empty: bool = True
    bad_boxes: BadBoxes = "clip"
    follow_links: bool = False
    max_pixels: Count = 100_000_000


class JointsArguments(SplitArguments):
    """Arguments of `joints`."""

    root: Name
    joints: Name = "joints.npy"
    images: Name = "images"
    margin: NonNegative = 0.1
    names: ClassNames | None = None
    pairs: Pairs | None = None
    limbs: Pairs | None = None
    follow_links: bool = False
    max_pixels: Count = 100_000_000


datasets.add(
    "voc", "paceline.data.datasets.voc:Voc", VocArguments, "boxes as PASCAL VOC has them, an xml file an image"
)
datasets.add(
    "coco",
    "paceline.data.datasets.coco:Coco",
    CocoArguments,
    "boxes, masks and keypoints as COCO has them, a json file for all images",
)
datasets.add(
    "joints",
    "paceline.data.datasets.joints:Joints",
    JointsArguments,
    "one person an image, with the joints of all in an npy or json file",
)
