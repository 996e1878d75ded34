"""A COCO json file read into arrays; everything that is not as it should be is named by its number in the file."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.datasets.segments import SegmentsBuilder
from paceline.data.objects import read_json

_MAX_PIXELS = 1 << 31


class Category(NamedTuple):
    """A kind of object, the names of its keypoints, and which of them, counted from 1, are joined by a line."""

    number: int
    name: str
    keypoints: list[str]
    skeleton: list[list[int]]


class CocoImages(NamedTuple):
    """The images, in the order of their numbers."""

    numbers: NDArray[np.int64]
    names: list[str]
    sizes: NDArray[np.int64]
    """Heights and widths, [N, 2]."""


class CocoObjects(NamedTuple):
    """The annotations of the wanted categories, ordered by their images."""

    numbers: NDArray[np.int64]
    images: NDArray[np.int64]
    """The place of each one's image among the images."""
    categories: NDArray[np.int64]
    boxes: NDArray[np.float64]
    """As they are written: x, y, width, height."""
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    outlines: NDArray[np.int64]
    """The number of each one's outline in the segments."""
    keypoints: NDArray[np.float32]
    """x, y and visibility as they are written, [M, J, 3]."""


def read_parts(path: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """The categories, images and annotations of a file."""
    content = read_json(path)
    parts = []
    for name in ("categories", "images", "annotations"):
        part = content.get(name) if isinstance(content, dict) else None
        if not isinstance(part, list):
            expected = "expected an object with the lists categories, images and annotations"
            raise DataError(f"{path}: has no list {name!r}; {expected}")
        parts.append(part)
    return parts[0], parts[1], parts[2]


def read_categories(path: Path, entries: list[Any]) -> list[Category]:
    """The categories in the order of their numbers."""
    found: dict[int, Category] = {}
    for place, entry in enumerate(entries, 1):
        reader = _Reader(path, "category", place, entry)
        name = reader.text("name")
        keypoints, skeleton = entry.get("keypoints") or [], entry.get("skeleton") or []
        if not isinstance(keypoints, list) or not all(isinstance(each, str) for each in keypoints):
            raise reader.error(f"keypoints is {keypoints!r}, expected a list of names")
        if not _is_skeleton(skeleton, len(keypoints)):
            raise reader.error(f"skeleton is {skeleton!r}, expected pairs of numbers from 1 to {len(keypoints)}")
        if reader.number in found:
            raise reader.error("is there twice")
        found[reader.number] = Category(reader.number, name, keypoints, skeleton)
    return [found[number] for number in sorted(found)]


def _is_skeleton(value: Any, count: int) -> bool:
    if not isinstance(value, list):
        return False
    pairs = [each for each in value if isinstance(each, list) and len(each) == 2]
    return len(pairs) == len(value) and all(type(end) is int and 1 <= end <= count for pair in pairs for end in pair)


def read_images(path: Path, entries: list[Any]) -> CocoImages:
    """The images in the order of their numbers."""
    found: dict[int, tuple[str, int, int]] = {}
    for place, entry in enumerate(entries, 1):
        reader = _Reader(path, "image", place, entry)
        name, height, width = reader.text("file_name"), reader.whole("height"), reader.whole("width")
        if height < 1 or width < 1 or height * width >= _MAX_PIXELS:
            raise reader.error(f"width and height are {width} and {height}")
        if reader.number in found:
            raise reader.error("is there twice")
        found[reader.number] = name, height, width
    if not found:
        raise DataError(f"{path}: the list 'images' is empty")
    numbers = sorted(found)
    sizes = np.array([found[number][1:] for number in numbers], np.int64)
    return CocoImages(np.array(numbers, np.int64), [found[number][0] for number in numbers], sizes)


def read_objects(
    path: Path,
    entries: list[Any],
    images: CocoImages,
    categories: Sequence[Category],
    wanted: Sequence[int],
    num_joints: int,
    with_masks: bool,
) -> tuple[CocoObjects, dict[str, NDArray[Any]]]:
    """The annotations of the categories numbered `wanted`, and the arrays of their outlines if asked for."""
    places = {number: place for place, number in enumerate(images.numbers.tolist())}
    known, chosen = {category.number for category in categories}, set(wanted)
    table = _Table(num_joints, with_masks)
    seen: set[int] = set()
    for place, entry in enumerate(entries, 1):
        reader = _Reader(path, "annotation", place, entry)
        category = reader.whole("category_id")
        if category not in known:
            raise reader.error(f"category_id is {category}, which is not among the categories")
        image = places.get(reader.whole("image_id"))
        if image is None:
            raise reader.error(f"image_id is {entry['image_id']}, which is not among the images")
        if reader.number in seen:
            raise reader.error("is there twice")
        seen.add(reader.number)
        if category in chosen:
            table.add(reader, image, category, images.sizes[image])
    return table.finished()


class _Table:
    """Annotations as columns of numbers, each of which takes no more memory than it has to."""

    def __init__(self, num_joints: int, with_masks: bool) -> None:
        self.num_joints = num_joints
        self.numbers, self.images, self.categories, self.crowd = array("q"), array("q"), array("q"), array("b")
        self.boxes, self.area, self.keypoints = array("d"), array("d"), array("f")
        self.outlines = SegmentsBuilder() if with_masks else None

    def add(self, reader: _Reader, image: int, category: int, size: NDArray[np.int64]) -> None:
        self.numbers.append(reader.number)
        self.images.append(image)
        self.categories.append(category)
        self.crowd.append(reader.flag("iscrowd"))
        box = reader.numbers("bbox", 4)
        self.boxes.extend(box)
        self.area.append(reader.numbers("area", 1)[0] if "area" in reader.entry else box[2] * box[3])
        if self.num_joints:
            self.keypoints.extend(reader.keypoints(self.num_joints))
        if self.outlines is not None:
            reader.outline(self.outlines, size)

    def finished(self) -> tuple[CocoObjects, dict[str, NDArray[Any]]]:
        images = np.array(self.images, np.int64)
        order = np.argsort(images, kind="stable")
        objects = CocoObjects(
            np.array(self.numbers, np.int64)[order],
            images[order],
            np.array(self.categories, np.int64)[order],
            np.array(self.boxes, np.float64).reshape(-1, 4)[order],
            np.array(self.crowd, np.bool_)[order],
            np.array(self.area, np.float64)[order],
            order,
            np.array(self.keypoints, np.float32).reshape(len(order), self.num_joints, 3)[order],
        )
        return objects, self.outlines.arrays() if self.outlines is not None else {}


class _Reader:
    """One entry of a list, and the words that name it."""

    def __init__(self, path: Path, kind: str, place: int, entry: Any) -> None:
        self.path, self.kind, self.entry = path, kind, entry
        self.name = f"number {place} of the list"
        if not isinstance(entry, dict):
            raise self.error(f"is {entry!r:.60}, expected an object with named values")
        self.number = self.whole("id")
        self.name = str(self.number)

    def error(self, text: str) -> DataError:
        return DataError(f"{self.path}: {self.kind} {self.name}: {text}")

    def value(self, key: str) -> Any:
        if key not in self.entry:
            raise self.error(f"has no {key!r}")
        return self.entry[key]

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str) or not value:
            raise self.error(f"{key} is {value!r:.60}, expected a text")
        return value

    def whole(self, key: str) -> int:
        value = self.value(key)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or abs(value) >= 1 << 63:
            raise self.error(f"{key} is {value!r:.60}, expected a whole number")
        return int(value)

    def flag(self, key: str) -> bool:
        value = self.entry.get(key, 0)
        if value not in (0, 1):
            raise self.error(f"{key} is {value!r:.60}, expected 0 or 1")
        return bool(value)

    def numbers(self, key: str, count: int) -> list[float]:
        value = self.value(key)
        values = [value] if count == 1 else value
        if not isinstance(values, list) or len(values) != count or not _all_finite(values):
            expected = "a number" if count == 1 else f"{count} numbers"
            raise self.error(f"{key} is {value!r:.60}, expected {expected}")
        return values

    def keypoints(self, count: int) -> list[float]:
        if not self.entry.get("keypoints"):
            return [0.0] * (3 * count)
        values = self.numbers("keypoints", 3 * count)
        if not {0, 1, 2}.issuperset(values[2::3]):
            raise self.error("a visibility among its keypoints is none of 0, 1 and 2")
        return values

    def outline(self, builder: SegmentsBuilder, size: NDArray[np.int64]) -> None:
        try:
            builder.add(self.value("segmentation"), int(size[0]), int(size[1]))
        except ValueError as error:
            raise self.error(str(error)) from error


def _all_finite(values: list[Any]) -> bool:
    try:
        return all(type(value) in (int, float) and math.isfinite(value) for value in values)
    except OverflowError:  # a whole number beyond all floating-point ones
        return False
