"""Masks of objects: outlines checked and packed for an index, and images whose pixels are the ids of instances."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.core.arguments import Count, CountOrZero, KeyOf, Requires
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import ClassNames, Name, SplitShares
from paceline.data.batch import Sample
from paceline.data.datasets.detection import (
    PARTLY_OUTSIDE,
    BadBoxes,
    BoxObject,
    DetectionDataset,
    at_most,
    write_boxes,
)
from paceline.data.datasets.image_mask import ImageMaskPairs
from paceline.data.fingerprint import DataDigest
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.io.image import Encoded, Pixels
from paceline.data.io.mask import MAX_ID, InstanceIds, decode_ids, decode_runs, encode_runs, pack_masks

_ROUNDING = 0.01  # pixels that a point of an outline may lie outside without a word
Id = Annotated[int, Field(ge=0, le=MAX_ID)]
_NO_INSTANCE = "is the number of no class"
_Classes = ClassNames | Annotated[Mapping[Name, Id], Field(min_length=1)]


def pack_outlines(outlines: Sequence[Any], sizes: Sequence[Sequence[int]]) -> tuple[list[bytes], list[str]]:
    """COCO's outlines as packed run lengths, and what is wrong with each, "" for nothing.

    `sizes` are the heights and widths of their images. What crosses itself is filled as pycocotools fills it.
    """
    pairs = [_pack_outline(outline, *size) for outline, size in zip(outlines, sizes, strict=True)]
    return [packed for packed, _ in pairs], [flaw for _, flaw in pairs]


def _pack_outline(outline: Any, height: int, width: int) -> tuple[bytes, str]:
    from faster_coco_eval.core import mask

    try:
        packed = encode_runs(outline, height, width)
    except ValueError as error:
        return b"", str(error)
    if not mask.area({"size": [height, width], "counts": packed}):
        return packed, "has a mask that covers no pixel of its image"
    limits = ((0, width), (1, height))
    is_outside = isinstance(outline, list) and any(
        min(part[axis::2]) < -_ROUNDING or max(part[axis::2]) > limit + _ROUNDING
        for part in outline
        for axis, limit in limits
    )
    return packed, PARTLY_OUTSIDE if is_outside else ""


def fill_outlines(outlines: Sequence[NDArray[np.float64]], height: int, width: int) -> Pixels:
    """The insides of outlines, whose points are shares of an image, as COCO fills polygons: 0 and 1, [K, H, W]."""
    near = [np.clip(outline, -1, 2).reshape(-1, 2) for outline in outlines]  # what lies further off takes time to fill
    scaled = [(points * [width, height]).ravel().tolist() for points in near]
    return decode_runs([encode_runs([each], height, width) for each in scaled], height, width)


def with_masks(sample: Sample, masks: Pixels) -> Sample:
    """The sample with the masks of its objects, whose areas are those of the masks."""
    return {**sample, "masks": masks, "area": masks.sum((1, 2), dtype=np.int64).astype(np.float32)}


class _Ids(NamedTuple):
    """How ids stand for classes and instances."""

    names: list[str]
    numbers: list[int]
    """What stands for each class: by default 1, 2, …"""
    divisor: int | None
    ignore_index: int | None


@register.dataset("image_instances", checks=[KeyOf("split", "split_shares"), Requires("split", "split_shares")])
class ImageInstances(DetectionDataset):
    """Images and masks of instance ids, one mask an image, matched by their names as in `image_mask`.

    The class of an instance is written in one of three ways: in its id, which is the number of the class ·
    `divisor` + the number of the instance, as in Cityscapes (the number of a class alone is a crowd of it; other ids
    below `divisor` are no instance, but if no mask has a larger one, all are bad); with `class_masks`, in masks of
    classes of the same names, as in Pascal VOC; with `divisor: null`, all are of the only class. Classes have the
    numbers 1, 2, …, or those that `classes` gives them. 0 and `ignore_index` are no instance.
    What is wrong with a mask or an instance follows `bad_boxes`; without a sound mask, the image is left out.
    """

    def __init__(
        self,
        root: Path,
        classes: Annotated[_Classes, Field(description="The names of classes 1, 2, …, or the number of each name.")],
        images: Name = "images",
        masks: Annotated[Name, Field(description="The folder of the masks, or a pattern of their names.")] = "masks",
        class_masks: Annotated[Name | None, Field(description="The folder of masks of classes.")] = None,
        divisor: Annotated[Count | None, Field(description="An id is class · divisor + number.")] = 1000,
        ignore_index: Annotated[Id | None, Field(description="An id that is no instance.")] = None,
        list_file: Annotated[Name | None, Field(description="A list of images in `root`, one a line.")] = None,
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
    ) -> None:
        root = Path(root)
        numbers = list(classes.values()) if isinstance(classes, Mapping) else list(range(1, len(classes) + 1))
        ids = _Ids(list(classes), numbers, None if class_masks else divisor, ignore_index)
        inside = None if follow_links else root
        if not root.is_dir():
            raise DataError(f"{root}: no such folder; expected one with the folders {images} and {masks}")
        for number in {each for each in numbers if numbers.count(each) > 1}:
            same = [name for name, each in zip(ids.names, numbers, strict=True) if each == number]
            raise DataError(f"{root}: `classes` gives {' and '.join(same)} the number {number}; give each its own")
        if ids.divisor is None and class_masks is None and len(ids.names) > 1:
            raise DataError(f"{root}: `divisor: null` is for one class, and `classes` has {len(ids.names)}")

        def build(builder: IndexBuilder) -> None:
            folders = [masks] if class_masks is None else [masks, class_masks]
            columns = []
            for folder in folders:
                pairs = ImageMaskPairs(builder, root, images, folder, None, inside)
                columns.append(pairs.find_all() if list_file is None else pairs.read_list(root / list_file))
            files = [
                (image, *(pair[1] for pair in more)) for (image, _), *more in zip(*[columns[0]], *columns, strict=True)
            ]
            _write(builder, root, files, ids, bad_boxes)

        arguments: dict[str, Any] = {"folders": [images, masks, class_masks], "list": list_file, "links": follow_links}
        arguments |= {"ids": list(ids), "bad_boxes": bad_boxes}
        index = open_index(root, "instances", arguments, build)
        super().__init__(index, root, inside, root / masks, split, split_shares, split_seed)
        self._masks = index.rows("mask")

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and what is known of their objects."""
        digest.files(self._files.folder, self._files.names(self._part), "images")
        for name in ("starts", "boxes", "classes", "crowd", "mask"):
            digest.array(name, self._index[name])

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size, and the boxes, classes, masks and so on of its objects."""
        sample, which = super().open(index), self._span(index)
        runs = [self._masks[place].tobytes() for place in range(which.start, which.stop)]
        return with_masks(sample, decode_runs(runs, *sample["size"].tolist()))


def _write(builder: IndexBuilder, root: Path, files: Sequence[Sequence[bytes]], ids: _Ids, policy: BadBoxes) -> None:
    """Write the objects of images into an index, given each image, its mask and perhaps its mask of classes."""
    objects: list[BoxObject] = []
    kept: list[bytes] = []
    sizes, problems = [], []
    for image, *masks in files:
        paths = [root / os.fsdecode(name) for name in (image, *masks)]
        try:
            planes = _read_planes(paths)
        except DataError as error:
            problems.append(str(error))
            continue
        objects += _find_objects(len(kept), paths[1], planes, ids)
        kept.append(image)
        sizes.append(planes[0].shape)
    if problems and (policy == "stop" or not kept):
        advice = "repair them, or set `bad_boxes: drop` to leave the images out"
        raise DataError("; ".join([*at_most(iter(problems), len(problems), 10), advice]))
    for line in at_most((f"{problem}; the image is left out" for problem in problems), len(problems)):
        builder.note(line)
    builder.facts["classes"] = ids.names
    builder.append_texts("file", kept)
    write_boxes(builder, _check_divisor(objects, ids), np.array(sizes, np.int64).reshape(-1, 2), policy)


def _check_divisor(objects: list[BoxObject], ids: _Ids) -> list[BoxObject]:
    """The objects without what is none; if not one id has the number of an instance, all are bad."""
    if ids.divisor is None:
        return objects
    if any(not each.is_crowd and each.mask_flaw != _NO_INSTANCE for each in objects):
        return [each for each in objects if each.mask_flaw != _NO_INSTANCE]
    advice = "`divisor: null`, if ids are the numbers of instances of the one class"
    if len(ids.names) > 1:
        advice = "the `divisor` of these masks, or `class_masks`"
    flaw = f"is below `divisor: {ids.divisor}`, as all ids of these masks, so it is no instance; set {advice}"
    return [each._replace(mask_flaw=flaw) for each in objects]


def _read_planes(paths: Sequence[Path]) -> list[NDArray[Any]]:
    """The ids in masks, which must have the size of their image, the first path."""
    image = Encoded.read(paths[0])
    planes = []
    for path in paths[1:]:
        plane = decode_ids(path, InstanceIds())
        if plane.shape != (image.height, image.width):
            found = f"the mask is {plane.shape[1]}×{plane.shape[0]} pixels"
            raise DataError(f"{path}: {found}, but its image {paths[0]} {image.width}×{image.height}")
        planes.append(plane)
    return planes


def _find_objects(row: int, path: Path, planes: Sequence[NDArray[Any]], ids: _Ids) -> Iterator[BoxObject]:
    """The instances in a mask of ids, with their boxes and run lengths."""
    for number in np.unique(planes[0]).tolist():
        inside = planes[0] == number
        if number in (0, ids.ignore_index):
            continue
        label, is_crowd, flaw = _class_of(number, inside, planes, ids)
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        (packed,) = [b""] if flaw else pack_masks(inside[None].astype(np.uint8))
        yield BoxObject(row, label, box, f"{path}: id {number}", is_crowd, packed, flaw)


def _class_of(
    number: int, inside: NDArray[np.bool_], planes: Sequence[NDArray[Any]], ids: _Ids
) -> tuple[int, bool, str]:
    """The class of an instance, whether it is a crowd, and what is wrong."""
    is_crowd = False
    if len(planes) > 1:
        values, counts = np.unique(planes[1][inside], return_counts=True)
        wanted = int(values[counts.argmax()])
    elif ids.divisor is None:
        wanted = ids.numbers[0]
    elif number < ids.divisor:
        if number not in ids.numbers:
            return 0, False, _NO_INSTANCE
        wanted, is_crowd = number, True
    else:
        wanted = number // ids.divisor
    if wanted in ids.numbers:
        return ids.numbers.index(wanted), is_crowd, ""
    known = ", ".join(f"{each} {name}" for each, name in zip(ids.numbers, ids.names, strict=True))
    return 0, False, f"has the class {wanted}, which is none of {known}"
