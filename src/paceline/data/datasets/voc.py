"""PASCAL VOC annotations: one XML file per image, and lists of names for the splits."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple
from xml.etree.ElementTree import Element, ParseError, fromstring

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count, CountOrZero, KeyOf
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import first_file
from paceline.data.argument_types import ClassNames, Name, SplitShares
from paceline.data.datasets.detection import (
    ANY_SIZE,
    BadBoxes,
    DetectionDataset,
    Problems,
    at_most,
    class_index,
    list_names,
    read_names,
    read_sizes,
    write_checked_objects,
)
from paceline.data.index.index import IndexBuilder, open_index, split_arguments, write_parts
from paceline.data.io.image import EXTENSIONS, MAX_PIXELS, read_bytes

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest

MAX_BYTES = 1 << 24
"""Bytes of the largest annotation that is read: tens of thousands of objects."""
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


@register.dataset("voc", checks=[KeyOf("split", "split_shares")])
class Voc(DetectionDataset):
    """The images root/`images` that root/`image_sets`/<split>.txt names, with an XML file in root/`annotations` each.

    The list may also lie at root/<split>.txt; without a split all annotations are taken, in the order of their names,
    and with `split_shares` the split is drawn from them.
    Pixels are counted from 1 in the files and both corners are included, so a box from xmin to xmax spans xmin − 1 to
    xmax here; one that begins where it ends is taken as empty. Difficult objects are marked as `crowd`. Unless given,
    the classes are all names in the annotations, sorted, so that the splits agree on them.
    """

    def __init__(
        self,
        root: Path,
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        classes: ClassNames | None = None,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
        images: Name = "JPEGImages",
        annotations: Name = "Annotations",
        image_sets: Name = "ImageSets/Main",
    ) -> None:
        root = Path(root)
        self._annotations = root / annotations
        list_name = None if split_shares else split
        inside = None if follow_links else root

        def build(builder: IndexBuilder) -> None:
            available = _stems(self._annotations, builder)
            names = _split_names(root, root / image_sets, list_name, available, builder) if list_name else available
            files = _image_names(root / images, names, builder)
            _write(builder, self._annotations, root / images, names, files, available, classes, bad_boxes)
            write_parts(builder, len(names), split_shares, split_seed)

        arguments = {"folders": [images, annotations, image_sets], "split": list_name, "bad_boxes": bad_boxes}
        arguments |= {"classes": classes and list(classes)} | split_arguments(split_shares, split_seed)
        index = open_index(root, "voc", arguments, build)
        super().__init__(index, root / images, inside, max_pixels, split, split_shares)

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and the content of the annotations."""
        images = list(self._files.names(self._part))
        digest.files(self._files.folder, images, "JPEGImages")
        annotations = [os.fsencode(f"{_stem(os.fsdecode(name))}.xml") for name in images]
        digest.files(self._annotations, annotations, "Annotations", by_content=True)


def _stems(folder: Path, builder: IndexBuilder) -> list[str]:
    expected = "a folder of XML files, one for each image; name it as `annotations`, and that of images as `images`"
    found = [name.removesuffix(".xml") for name in list_names(folder, builder, expected) if name.endswith(".xml")]
    if not found:
        raise DataError(f"{folder}: no XML files in it; expected {expected}")
    return found


def _split_names(root: Path, lists: Path, split: str, available: list[str], builder: IndexBuilder) -> list[str]:
    """The names in the list of a split, each found to have an annotation."""
    path = first_file([lists / f"{split}.txt", root / f"{split}.txt"])
    if path is None:
        there = ", ".join(sorted(each.stem for folder in (lists, root) for each in folder.glob("*.txt")))
        found = f"the lists are {there}" if there else "there are no lists: leave `split` out, or give `split_shares`"
        raise DataError(f"{lists / split}.txt: no such list, nor {root / split}.txt; {found}")
    return read_names(path, set(available), builder, "expected a name in each line", _stem)


def _stem(name: str) -> str:
    suffix = PurePosixPath(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in EXTENSIONS else name


def _image_names(folder: Path, names: list[str], builder: IndexBuilder) -> list[str]:
    """The file of each image: what is called like its annotation, whatever the kind of image."""
    there = list_names(folder, builder, "the images")
    by_stem = {_stem(each): each for each in reversed(there) if each.lower().endswith(EXTENSIONS)}
    return [by_stem.get(name, f"{name}.jpg") for name in names]


class _Object(NamedTuple):
    """An object as it is written: its corners are the numbers of pixels, counted from 1, both included."""

    name: str
    corners: tuple[float, ...]
    is_difficult: bool


class _Annotation(NamedTuple):
    """What the file says of an image; height and width are 0 where it says nothing."""

    height: int
    width: int
    objects: list[_Object]


def _write(
    builder: IndexBuilder,
    folder: Path,
    images: Path,
    names: list[str],
    files: list[str],
    available: list[str],
    classes: Sequence[str] | None,
    bad_boxes: BadBoxes,
) -> None:
    """Write the images and their objects; all that is wrong with the annotations is one DataError."""
    problems = Problems(folder)

    def annotation(name: str) -> _Annotation:
        builder.watch(folder / f"{name}.xml")
        return _read_xml(folder / f"{name}.xml", problems)

    annotations = [annotation(name) for name in names]
    others = [] if classes else [annotation(name) for name in sorted(set(available).difference(names))]
    problems.refuse("repair or remove them")
    objects = [(name, *each) for name, of in zip(names, annotations, strict=True) for each in enumerate(of.objects, 1)]
    found = [(written.name, f"{name}.xml object {number}") for name, number, written in objects]
    found += [(written.name, "") for annotation in others for written in annotation.objects]
    numbers = class_index(folder, found, classes)
    sizes = _sizes(builder, folder, images, names, files, annotations)
    builder.append_texts("file", [os.fsencode(name) for name in files])
    _write_objects(builder, folder, names, annotations, sizes, numbers, bad_boxes)
    builder.facts["classes"] = list(numbers)


def _sizes(
    builder: IndexBuilder,
    folder: Path,
    images: Path,
    names: list[str],
    files: list[str],
    annotations: list[_Annotation],
) -> NDArray[np.int64]:
    """The height and width of each image as it is, [N, 2]; it is noted where the annotations say something else."""
    sizes, notes = read_sizes([images / file for file in files], builder), []
    for row, (name, annotation) in enumerate(zip(names, annotations, strict=True)):
        written, (height, width) = (annotation.height, annotation.width), sizes[row].tolist()
        if 0 in written or written == (height, width):
            continue
        if height == ANY_SIZE:
            sizes[row] = written
        else:
            real = f"{width}×{height}"
            notes.append(f"{folder / name}.xml: says {written[1]}×{written[0]}, but the image is {real}, which counts")
    builder.facts["notes"] += at_most(notes, len(notes))
    return sizes


def _write_objects(
    builder: IndexBuilder,
    folder: Path,
    names: list[str],
    annotations: list[_Annotation],
    sizes: NDArray[np.int64],
    numbers: dict[str, int],
    bad_boxes: BadBoxes,
) -> None:
    written = [each for annotation in annotations for each in annotation.objects]
    images = np.repeat(np.arange(len(names)), [len(annotation.objects) for annotation in annotations])
    corners = np.array([each.corners for each in written], np.float64).reshape(-1, 4)

    def place(box: int) -> str:
        number = box - int(np.searchsorted(images, images[box])) + 1
        values = " ".join(f"{value:g}" for value in corners[box])
        return f"{folder / names[images[box]]}.xml: object {number} ({written[box].name}), {values}"

    extents = corners[:, 2:] - corners[:, :2]
    labels = np.array([numbers[each.name] for each in written], np.int64)
    is_difficult = np.array([each.is_difficult for each in written], np.bool_)
    boxes = corners - (1, 1, 0, 0)
    write_checked_objects(
        builder, len(names), images, boxes, extents, sizes[images], labels, bad_boxes, place, is_difficult
    )


def _read_xml(path: Path, problems: Problems) -> _Annotation:
    """The annotation in a file; what is missing in it, or is no number, is added to the problems."""
    objects: list[_Object] = []
    try:
        root = _parse(path)
    except DataError as error:
        problems.add("not a VOC annotation", str(error).removeprefix(f"{path.parent}/"))
        return _Annotation(0, 0, objects)
    for number, element in enumerate(root.findall("object"), 1):
        place = f"{path.name} object {number}"
        name = (element.findtext("name") or "").strip()
        corners = tuple(_number(element.findtext(f"bndbox/{corner}")) for corner in _CORNERS)
        if not name:
            problems.add("no <name>", place)
        for corner, value in zip(_CORNERS, corners, strict=True):
            if math.isnan(value):
                found = (element.findtext(f"bndbox/{corner}") or "").strip()
                problems.add(f"no number as <{corner}> of a <bndbox>", f"{place} ({found!r})" if found else place)
        objects.append(_Object(name, corners, (element.findtext("difficult") or "").strip() == "1"))
    height, width = (_number(root.findtext(f"size/{side}")) for side in ("height", "width"))
    is_known = 0 < height < ANY_SIZE and 0 < width < ANY_SIZE
    return _Annotation(int(height) if is_known else 0, int(width) if is_known else 0, objects)


def _number(text: str | None) -> float:
    """The number in an element; NaN if it is none, or not finite."""
    try:
        value = float(text or "nan")
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _parse(path: Path) -> Element:
    content = read_bytes(path)
    if len(content) > MAX_BYTES:
        raise DataError(f"{path}: {len(content):,} bytes; an annotation has at most {MAX_BYTES:,}")
    if b"<!DOCTYPE" in content.replace(b"\0", b""):  # of two bytes a character, too
        raise DataError(f"{path}: has a DOCTYPE, which is not read: it can make a small file huge; remove it")
    try:
        root = fromstring(content)
    except (ParseError, LookupError, ValueError) as error:
        raise DataError(f"{path}: not well-formed xml ({error})") from error
    if root.tag != "annotation":
        raise DataError(f"{path}: the outermost element is <{root.tag}>, expected <annotation>")
    return root
