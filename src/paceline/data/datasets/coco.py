"""Objects in images as COCO keeps them: one JSON file with boxes, masks and keypoints, and a folder of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count, CountOrZero, KeyOf, Requires
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.argument_types import ClassNames, Name, SplitShares
from paceline.data.batch import RAGGED, KeypointNames, Sample
from paceline.data.datasets.detection import (
    BadBoxes,
    DetectionDataset,
    Problems,
    check_boxes,
    read_json,
    write_objects,
)
from paceline.data.datasets.keypoints import find_flip_pairs
from paceline.data.index.index import IndexBuilder, open_index, split_arguments, write_parts
from paceline.data.index.list_file import encode_name
from paceline.data.io.image import MAX_PIXELS
from paceline.data.io.mask import decode_runs, encode_runs

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest

_MAX_SIZE = 1 << 31  # pixels
_PARTS = ("categories", "images", "annotations")


@register.dataset(
    "coco",
    checks=[KeyOf("split", "split_shares"), Requires("split", "split_shares"), Requires("per_object", "keypoints")],
)
class Coco(DetectionDataset):
    """The images of a COCO JSON file, in the order of their ids, with boxes and, if wanted, masks and keypoints.

    Classes are numbered in the order of their category ids, or as `classes` names them, which leaves out all others;
    class k has the id `category_ids[k]`. Boxes keep their coordinates, as x1 y1 x2 y2. A keypoint is the number of a
    pixel in these files, so it lies half a pixel further, in that pixel's middle. Masks are those of pycocotools.
    With `per_object`, each object with labeled keypoints is a sample of its own, as pose networks take them; crowds are
    left out. With `keep_empty: false`, images without any object are left out; with `split_shares` the split is drawn.
    """

    def __init__(
        self,
        root: Path,
        annotations: Name,
        images: Name = "images",
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        classes: ClassNames | None = None,
        masks: bool = False,
        keypoints: bool = False,
        per_object: bool = False,
        keep_empty: bool = True,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
    ) -> None:
        root = Path(root)
        self.annotations = file = root / annotations

        def build(builder: IndexBuilder) -> None:
            builder.watch(file)
            content = _CocoFile(file, masks)
            chosen = content.choose(classes)
            _write(builder, content, chosen, keypoints, keep_empty, bad_boxes)
            write_parts(builder, builder.facts["num_images"], split_shares, split_seed)

        arguments: dict[str, Any] = {
            "file": str(file.absolute()),
            "classes": classes and list(classes),
            "bad_boxes": bad_boxes,
        }
        arguments |= {"masks": masks, "keypoints": keypoints, "keep_empty": keep_empty}
        index = open_index(root, "coco", arguments | split_arguments(split_shares, split_seed), build)
        super().__init__(index, root / images, None if follow_links else root, max_pixels, split, split_shares)
        self.category_ids: list[int] = index.facts["category_ids"]
        self.joints = KeypointNames.from_json(index.facts["keypoint_names"]) if keypoints else None
        self._masks = index.rows("mask") if masks else None
        self._chosen: NDArray[np.int64] | None = None
        if per_object:
            self._part, self._chosen = self._divide()

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and the content of the annotations."""
        digest.content(self.annotations)
        digest.files(self._files.folder, self._files.names(self._part), "images")

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size and id, and the boxes, classes and so on of its objects."""
        sample, row = super().open(index), int(self._part[index])
        (height, width), number = self._index["sizes"][row].tolist(), int(self._index["image_ids"][row])
        image = sample["image"]
        if (image.height, image.width) != (height, width):
            says = f"{self.annotations} says {width}×{height} of image {number}"
            raise DataError(f"{self._files.path(row)}: is {image.width}×{image.height}, but {says}; repair either")
        which = self._span(row)
        if self._masks is not None:
            runs = [self._masks[place].tobytes() for place in range(which.start, which.stop)]
            sample["masks"] = decode_runs(runs, height, width)
        if self.joints is not None:
            sample["keypoints"] = self._index["keypoints"][which].copy()
        if self._chosen is not None:
            place = int(self._chosen[index]) - which.start
            sample = {name: value[place : place + 1] if name in RAGGED else value for name, value in sample.items()}
        return {**sample, "image_id": number}

    def _divide(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The image and the number of each object that is a sample of its own."""
        starts, rows = self._index["starts"].astype(np.int64), np.asarray(self._part)
        objects = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        owners = np.repeat(rows, starts[rows + 1] - starts[rows])
        is_labeled = (self._index["keypoints"][objects, :, 2] > 0).any(1)
        kept = is_labeled & (self._index["crowd"][objects] == 0)
        return owners[kept], objects[kept]


class _Category(NamedTuple):
    """A kind of object, the names of its keypoints, and which of them, counted from 1, are joined by a line."""

    number: int
    name: str
    keypoints: list[str]
    skeleton: list[list[int]]


class _Image(NamedTuple):
    number: int
    name: str
    height: int
    width: int


class _Annotation(NamedTuple):
    number: int
    image: int
    category: int
    box: list[float]
    crowd: bool
    area: float
    keypoints: list[float]
    runs: bytes


class _WrongEntry(Exception):  # noqa: N818 - never leaves this file
    """An entry lacks something, or has something else."""

    def __init__(self, what: str, found: Any = None) -> None:
        super().__init__(what)
        self.found = "" if found is None else f" ({found!r:.60})"


class _CocoFile:
    """The categories, images and annotations of a file; all that is wrong with them is one DataError."""

    def __init__(self, path: Path, with_masks: bool) -> None:
        self.path, self._problems, self._with_masks = path, Problems(path), with_masks
        content = read_json(path, leave_out="" if with_masks else "segmentation")
        lacking = [name for name in _PARTS if not isinstance(content, dict) or not isinstance(content.get(name), list)]
        if lacking:
            expected = f"expected an object with the lists {', '.join(_PARTS)}"
            raise DataError(f"{path}: has no list {', '.join(map(repr, lacking))}; {expected}")
        entries: list[Any] = content["annotations"]
        if entries and isinstance(entries[0], dict) and "segments_info" in entries[0] and "bbox" not in entries[0]:
            advice = "take the file of instances, or the masks as images with `dataset: image_mask`"
            raise DataError(f"{path}: a panoptic file: its annotations have 'segments_info' and no 'bbox'; {advice}")
        self.notes: list[str] = []
        if entries and not any(isinstance(entry, dict) and "id" in entry for entry in entries):
            self.notes.append("annotations have no 'id'; they are numbered in the order of the file")
            entries = [
                entry | {"id": number} if isinstance(entry, dict) else entry for number, entry in enumerate(entries, 1)
            ]
        empty = next((name for name in _PARTS[:2] if not content[name]), None)
        if empty is not None:
            raise DataError(f"{path}: the list {empty!r} is empty")
        self._ids: dict[str, set[int]] = {}
        self.categories = sorted(self._read("category", content["categories"], _category))
        self.images = sorted(self._read("image", content["images"], _image))
        self._rows = {image.number: row for row, image in enumerate(self.images)}
        self.annotations = [each for each in self._read("annotation", entries, self._annotation) if each]
        self._problems.refuse()

    def _read(self, kind: str, entries: list[Any], read: Callable[[int, dict[str, Any]], Any]) -> Iterator[Any]:
        seen = self._ids.setdefault(kind, set())
        for place, entry in enumerate(entries, 1):
            name = f"number {place} of the list"
            try:
                if not isinstance(entry, dict):
                    raise _WrongEntry("is no object with named values", entry)
                number = _whole(entry, "id")
                name = str(number)
                if number in seen:
                    raise _WrongEntry("has the same id as another")
                seen.add(number)
                yield read(number, entry)
            except _WrongEntry as error:
                self._problems.add(f"{kind} {error}", f"{name}{error.found}")

    def _annotation(self, number: int, entry: dict[str, Any]) -> _Annotation | None:
        category, image = _whole(entry, "category_id"), _whole(entry, "image_id")
        for key, found, kind in (("category_id", category, "category"), ("image_id", image, "image")):
            if found not in self._ids[kind]:
                raise _WrongEntry(f"has a {key} that no {kind} has", found)
        row = self._rows.get(image)
        if row is None:
            return None  # the image is a problem of its own
        box = _numbers(entry, "bbox", 4)
        area = _numbers(entry, "area", 1)[0] if "area" in entry else box[2] * box[3]
        crowd = entry.get("iscrowd", 0)
        if crowd not in (0, 1):
            raise _WrongEntry("has an iscrowd that is neither 0 nor 1", crowd)
        runs = b""
        if self._with_masks:
            try:
                runs = encode_runs(entry.get("segmentation"), self.images[row].height, self.images[row].width)
            except ValueError as error:
                raise _WrongEntry(str(error), entry.get("segmentation")) from error
        return _Annotation(number, row, category, box, bool(crowd), area, entry.get("keypoints") or [], runs)

    def choose(self, classes: Sequence[str] | None) -> list[_Category]:
        """The categories of these names, or all."""
        by_name = {category.name: category for category in self.categories}
        if len(by_name) < len(self.categories):
            twice = next(category.name for category in self.categories if by_name[category.name] is not category)
            raise DataError(f"{self.path}: two categories are called {twice!r}; rename one of them")
        unknown = [name for name in classes or () if name not in by_name]
        if unknown:
            raise DataError(f"{self.path}: has no category {unknown[0]!r}; it has {', '.join(by_name)}")
        return [by_name[name] for name in classes] if classes else self.categories

    def read_keypoints(self, annotations: Sequence[_Annotation], count: int) -> NDArray[np.float32]:
        """x, y and visibility of each annotation's keypoints, [M, J, 3], in the middles of their pixels."""
        rows = []
        for each in annotations:
            values = each.keypoints or [0.0] * (3 * count)
            if len(values) != 3 * count or not _all_finite(values) or not {0, 1, 2}.issuperset(values[2::3]):
                expected = f"{count} times x, y and a visibility of 0, 1 or 2"
                self._problems.add(
                    f"annotation has keypoints that are not {expected}", f"{each.number} ({values!r:.60})"
                )
            rows.append(values)
        self._problems.refuse()
        keypoints = np.array(rows, np.float32).reshape(len(rows), count, 3)
        is_labeled = keypoints[..., 2:] > 0
        positions = np.where(is_labeled, keypoints[..., :2] + np.float32(0.5), np.float32(0))
        return np.concatenate([positions, keypoints[..., 2:]], axis=2)


def _category(number: int, entry: dict[str, Any]) -> _Category:
    keypoints, skeleton = entry.get("keypoints") or [], entry.get("skeleton") or []
    if not isinstance(keypoints, list) or not all(isinstance(each, str) for each in keypoints):
        raise _WrongEntry("has keypoints that are no list of names", keypoints)
    ends = range(1, len(keypoints) + 1)
    if not isinstance(skeleton, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(end in ends for end in pair) for pair in skeleton
    ):
        raise _WrongEntry(f"has a skeleton that is no list of pairs from 1 to {len(keypoints)}", skeleton)
    return _Category(number, _text(entry, "name"), keypoints, skeleton)


def _image(number: int, entry: dict[str, Any]) -> _Image:
    image = _Image(number, _text(entry, "file_name"), _whole(entry, "height"), _whole(entry, "width"))
    if image.height < 1 or image.width < 1 or image.height * image.width >= _MAX_SIZE:
        raise _WrongEntry("has an impossible width and height", (image.width, image.height))
    return image


def _value(entry: dict[str, Any], key: str) -> Any:
    if key not in entry:
        raise _WrongEntry(f"has no {key!r}")
    return entry[key]


def _text(entry: dict[str, Any], key: str) -> str:
    value = _value(entry, key)
    if not isinstance(value, str) or not value:
        raise _WrongEntry(f"has a {key} that is no text", value)
    return value


def _whole(entry: dict[str, Any], key: str) -> int:
    value = _value(entry, key)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or abs(value) >= 1 << 63:
        raise _WrongEntry(f"has a {key} that is no whole number", value)
    return int(value)


def _numbers(entry: dict[str, Any], key: str, count: int) -> list[float]:
    value = _value(entry, key)
    values = [value] if count == 1 else value
    if not isinstance(values, list) or len(values) != count or not _all_finite(values):
        raise _WrongEntry(f"has a {key} that is not {'a number' if count == 1 else f'{count} numbers'}", value)
    return values


def _all_finite(values: list[Any]) -> bool:
    try:
        return all(type(value) in (int, float) and math.isfinite(value) for value in values)
    except OverflowError:  # a whole number beyond all floating-point ones
        return False


def _write(
    builder: IndexBuilder,
    content: _CocoFile,
    chosen: list[_Category],
    with_keypoints: bool,
    keep_empty: bool,
    bad_boxes: BadBoxes,
) -> None:
    """Write the images and the objects of the chosen categories."""
    path, numbers = content.path, {category.number: place for place, category in enumerate(chosen)}
    names = _keypoint_names(path, chosen) if with_keypoints else None
    objects = sorted((each for each in content.annotations if each.category in numbers), key=lambda each: each.image)
    boxes = np.array([each.box for each in objects], np.float64).reshape(-1, 4)
    images = np.array([each.image for each in objects], np.int64)
    sizes = np.array([(image.height, image.width) for image in content.images], np.int64)

    def place(box: int) -> str:
        each, values = objects[box], " ".join(f"{value:g}" for value in boxes[box])
        name, file = chosen[numbers[each.category]].name, content.images[each.image].name
        return f"{path}: annotation {each.number} ({name}, {file}), bbox {values}"

    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    checked = check_boxes(corners, boxes[:, 2:], sizes[images], bad_boxes, place)
    kept = [each for each, is_kept in zip(objects, checked.kept.tolist(), strict=True) if is_kept]
    others = len(content.annotations) - len(objects)
    left_out = [f"{path}: {others:,} annotations of other classes are left out"] if others else []
    builder.facts["notes"] += [*content.notes, *checked.notes, *left_out]
    images = images[checked.kept]
    rows = np.arange(len(sizes)) if keep_empty else np.unique(images)
    if not len(rows):
        raise DataError(f"{path}: no image has an object of the classes {', '.join(each.name for each in chosen)}")
    labels = np.array([numbers[each.category] for each in kept], np.int64)
    crowd, area = np.array([each.crowd for each in kept], np.bool_), np.array([each.area for each in kept], np.float32)
    builder.append_texts("file", [encode_name(path, 0, content.images[row].name) for row in rows])
    write_objects(builder, len(rows), np.searchsorted(rows, images), checked.boxes, labels, crowd, area)
    builder.append("sizes", sizes[rows])
    builder.append("image_ids", np.array([content.images[row].number for row in rows], np.int64))
    builder.append_texts("mask", [each.runs for each in kept])
    if names is not None:
        builder.append("keypoints", content.read_keypoints(kept, len(names.names)))
    builder.facts |= {"classes": [each.name for each in chosen], "category_ids": list(numbers)}
    builder.facts |= {"keypoint_names": names, "num_images": len(rows)}


def _keypoint_names(path: Path, categories: list[_Category]) -> KeypointNames:
    """The keypoints of the categories, which those that have any must have in common."""
    named = [category for category in categories if category.keypoints]
    if not named:
        raise DataError(
            f"{path}: none of the categories has keypoints; take the file with keypoints, or leave them out"
        )
    first = named[0]
    other = next((each for each in named if each.keypoints != first.keypoints), None)
    if other is not None:
        advice = "choose one of them by `classes`"
        raise DataError(f"{path}: {first.name} and {other.name} have different keypoints; {advice}")
    skeleton = [(start - 1, end - 1) for start, end in first.skeleton]
    return KeypointNames(list(first.keypoints), find_flip_pairs(first.keypoints), skeleton)
