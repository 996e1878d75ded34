"""Objects in images as COCO keeps them: one JSON file with boxes, masks and keypoints, and a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

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
from paceline.data.datasets.instances import pack_outlines
from paceline.data.datasets.keypoints import find_flip_pairs
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.index.list_file import encode_name
from paceline.data.io.mask import decode_runs

_MAX_SIZE = 1 << 31  # pixels


@register.dataset(
    "coco",
    checks=[
        KeyOf("split", "split_shares"),
        Requires("split", "split_shares"),
        Requires("per_object", "keypoints"),
        Requires("min_keypoints", "keypoints"),
    ],
)
class Coco(DetectionDataset):
    """The images of a COCO JSON file, in the order of their ids, with boxes and, if wanted, masks and keypoints.

    Classes are numbered in the order of their category ids, or as `classes` names them, which leaves out all others;
    class k has the id `category_ids[k]`. Boxes keep their coordinates, as x1 y1 x2 y2. A keypoint is the number of a
    pixel in these files, so it lies half a pixel further, in that pixel's middle. Masks are those of pycocotools.
    With `per_object`, each object with labeled keypoints is a sample of its own, as pose networks take them; crowds are
    left out. With `keep_empty: false`, images without any object are left out; with `min_keypoints`, images of fewer
    labeled keypoints. With `split_shares` the split is drawn.
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
        min_keypoints: Count | None = None,
        keep_empty: bool = True,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
    ) -> None:
        root = Path(root)
        file = root / annotations

        def build(builder: IndexBuilder) -> None:
            builder.watch(file)
            content = _CocoFile(file, masks)
            content.write(builder, content.choose(classes), keypoints, keep_empty, bad_boxes)

        arguments: dict[str, Any] = {
            "file": str(file.absolute()),
            "classes": classes and list(classes),
            "bad_boxes": bad_boxes,
        }
        arguments |= {"masks": masks, "keypoints": keypoints, "keep_empty": keep_empty}
        index = open_index(root, "coco", arguments, build)
        inside = None if follow_links else root
        super().__init__(index, root / images, inside, file, split, split_shares, split_seed)
        self.category_ids: list[int] = index.facts["category_ids"]
        self.joints = KeypointNames.from_json(index.facts["keypoint_names"]) if keypoints else None
        self._masks = index.rows("mask") if masks else None
        if min_keypoints:
            self._part = self._images_with(min_keypoints)
        self._chosen: NDArray[np.int64] | None = None
        if per_object:
            self._part, self._chosen = self._divide()

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

    def image_sizes(self) -> NDArray[np.int64]:
        """The height and width of each image, [N, 2], as the file says."""
        sizes: NDArray[np.int64] = self._index["sizes"][np.asarray(self._part)]
        return sizes

    def _images_with(self, min_keypoints: int) -> NDArray[np.int64]:
        """The images whose objects have so many labeled keypoints together."""
        labeled = (self._index["keypoints"][..., 2] > 0).sum(1)
        before, starts = np.concatenate([[0], labeled.cumsum()]), self._index["starts"].astype(np.int64)
        rows = np.asarray(self._part)
        chosen: NDArray[np.int64] = rows[before[starts[rows + 1]] - before[starts[rows]] >= min_keypoints]
        return chosen

    def _divide(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The image and the number of each object that is a sample of its own."""
        starts, rows = self._index["starts"].astype(np.int64), np.asarray(self._part)
        objects = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        owners = np.repeat(rows, starts[rows + 1] - starts[rows])
        is_labeled = (self._index["keypoints"][objects, :, 2] > 0).any(1)
        kept = is_labeled & (self._index["crowd"][objects] == 0)
        return owners[kept], objects[kept]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a text")
    return value


_Text = Annotated[Any, AfterValidator(_text)]  # pydantic's own is of UTF-8, and names of files need not be
_Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(slots=True)
class _Category:
    """A kind of object, the names of its keypoints, and which of them, counted from 1, are joined by a line."""

    id: _Whole
    name: _Text
    keypoints: list[str] | None = None
    skeleton: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None = None

    def __post_init__(self) -> None:
        count = len(self.keypoints or ())
        if not all(1 <= end <= count for pair in self.skeleton or () for end in pair):
            raise ValueError(f"has a skeleton that is no list of pairs from 1 to {count}")


@dataclass(slots=True)
class _Image:
    id: _Whole
    file_name: _Text
    height: Count
    width: Count

    def __post_init__(self) -> None:
        if self.height * self.width >= _MAX_SIZE:
            raise ValueError(f"has an impossible width and height, {self.width}×{self.height}")


@dataclass(slots=True)
class _Annotation:
    id: _Whole
    image_id: _Whole
    category_id: _Whole
    bbox: Annotated[list[_Number], Field(min_length=4, max_length=4)]
    area: _Number | None = None
    iscrowd: Literal[0, 1] = 0
    keypoints: list[_Number] | None = None
    segmentation: Any = None


class _CocoFile:
    """The categories, images and annotations of a file; all that is wrong with them is one DataError."""

    def __init__(self, path: Path, with_masks: bool) -> None:
        self.path, self._problems = path, Problems(path)
        content = read_json(path, leave_out="" if with_masks else "segmentation")
        parts = ("categories", "images", "annotations")
        lacking = [name for name in parts if not isinstance(content, dict) or not isinstance(content.get(name), list)]
        if lacking:
            expected = f"expected an object with the lists {', '.join(parts)}"
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
        empty = next((name for name in parts[:2] if not content[name]), None)
        if empty is not None:
            raise DataError(f"{path}: the list {empty!r} is empty")
        self._ids: dict[str, set[str]] = {"category": set(), "image": set(), "annotation": set()}
        self.categories = dict(sorted(self._read("category", content["categories"], _Category).items()))
        self.images = dict(sorted(self._read("image", content["images"], _Image).items()))
        self.annotations = self._read("annotation", entries, _Annotation)
        for number, each in self.annotations.items():
            for kind, found in (("category", each.category_id), ("image", each.image_id)):
                if str(found) not in self._ids[kind]:
                    self._problems.add(f"annotation has a {kind}_id that no {kind} has", f"{number} ({found})")
        self._problems.refuse()
        self._with_masks = with_masks

    def _read(self, kind: str, entries: list[Any], entry_type: type[Any]) -> dict[int, Any]:
        """The entries of a list by their ids, in the order of the list; wrong ones are problems."""
        adapter, found, ids = TypeAdapter(entry_type), dict[int, Any](), self._ids[kind]
        for place, entry in enumerate(entries, 1):
            written = entry.get("id") if isinstance(entry, dict) else None
            name = f"number {place} of the list" if written is None else f"{written!s:.60}"
            try:
                each = adapter.validate_python(entry)
                name = str(each.id)
                if each.id in found:
                    self._problems.add(f"{kind} has the same id as another", name)
                found[each.id] = each
            except ValidationError as error:
                self._add_problem(kind, name, entry, error)
            ids.add(name)
        return found

    def _add_problem(self, kind: str, name: str, entry: Any, error: ValidationError) -> None:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        if not isinstance(entry, dict):
            self._problems.add(f"{kind} is no object with named values", f"{name} ({entry!r:.60})")
        elif not key:
            self._problems.add(f"{kind} {first['ctx']['error']}", name)
        elif key not in entry:
            self._problems.add(f"{kind} has no {key!r}", name)
        else:
            self._problems.add(
                f"{kind} has a wrong {key!r}, {first['msg'].removeprefix('Value error, ')}",
                f"{name} ({entry[key]!r:.60})",
            )

    def choose(self, classes: Sequence[str] | None) -> list[_Category]:
        """The categories of these names, or all."""
        by_name = {category.name: category for category in self.categories.values()}
        if len(by_name) < len(self.categories):
            twice = next(each.name for each in self.categories.values() if by_name[each.name] is not each)
            raise DataError(f"{self.path}: two categories are called {twice!r}; rename one of them")
        unknown = [name for name in classes or () if name not in by_name]
        if unknown:
            raise DataError(f"{self.path}: has no category {unknown[0]!r}; it has {', '.join(by_name)}")
        return [by_name[name] for name in classes or by_name]

    def write(
        self,
        builder: IndexBuilder,
        chosen: list[_Category],
        with_keypoints: bool,
        keep_empty: bool,
        bad_boxes: BadBoxes,
    ) -> int:
        """Write the images and the objects of the chosen categories; how many images there are."""
        names = _keypoint_names(self.path, chosen) if with_keypoints else None
        labels = {category.id: place for place, category in enumerate(chosen)}
        rows = {number: row for row, number in enumerate(self.images)}
        files = list(self.images.values())
        found = [each for each in self.annotations.values() if each.category_id in labels]
        found.sort(key=lambda each: each.image_id)
        corners = np.array([each.bbox for each in found], np.float64).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        images = np.array([rows[each.image_id] for each in found], np.int64)
        sizes = np.array([(image.height, image.width) for image in files], np.int64)

        def place(box: int) -> str:
            each, values = found[box], " ".join(f"{value:g}" for value in found[box].bbox)
            name, file = self.categories[each.category_id].name, self.images[each.image_id].file_name
            return f"{self.path}: annotation {each.id} ({name}, {file}), bbox {values}"

        outlines = [each.segmentation for each in found]
        masks, flaws = pack_outlines(outlines, sizes[images].tolist()) if self._with_masks else ([b""] * len(found), [])
        checked = check_boxes(corners, sizes[images], bad_boxes, place, flaws)
        kept = [found[number] for number in np.flatnonzero(checked.kept)]
        others = len(self.annotations) - len(found)
        left_out = [f"{self.path}: {others:,} annotations of other classes are left out"] if others else []
        builder.facts["notes"] += [*self.notes, *checked.notes, *left_out]
        images = images[checked.kept]
        used = np.arange(len(files)) if keep_empty else np.unique(images)
        if not len(used):
            wanted = ", ".join(each.name for each in chosen)
            raise DataError(f"{self.path}: no image has an object of the classes {wanted}")
        classes = np.array([labels[each.category_id] for each in kept], np.int64)
        crowd = np.array([each.iscrowd for each in kept], np.bool_)
        areas = [each.bbox[2] * each.bbox[3] if each.area is None else each.area for each in kept]
        builder.append_texts("file", [encode_name(self.path, 0, files[row].file_name) for row in used])
        area = np.array(areas, np.float32)
        write_objects(builder, len(used), np.searchsorted(used, images), checked.boxes, classes, crowd, area)
        builder.append("sizes", sizes[used])
        builder.append("image_ids", np.array([files[row].id for row in used], np.int64))
        builder.append_texts("mask", [masks[number] for number in np.flatnonzero(checked.kept)])
        if names is not None:
            builder.append("keypoints", self._read_keypoints(kept, len(names.names)))
        builder.facts |= {"classes": [each.name for each in chosen], "category_ids": list(labels)}
        builder.facts["keypoint_names"] = names
        return len(used)

    def _read_keypoints(self, annotations: Sequence[_Annotation], count: int) -> NDArray[np.float32]:
        """x, y and visibility of each annotation's keypoints, [M, J, 3], in the middles of their pixels."""
        rows = []
        for each in annotations:
            values = each.keypoints or [0.0] * (3 * count)
            if len(values) != 3 * count or not {0, 1, 2}.issuperset(values[2::3]):
                expected = f"{count} times x, y and a visibility of 0, 1 or 2"
                self._problems.add(f"annotation has keypoints that are not {expected}", f"{each.id} ({values!r:.60})")
            rows.append(values)
        self._problems.refuse()
        keypoints = np.array(rows, np.float32).reshape(len(rows), count, 3)
        is_labeled = keypoints[..., 2:] > 0
        positions = np.where(is_labeled, keypoints[..., :2] + np.float32(0.5), np.float32(0))
        return np.concatenate([positions, keypoints[..., 2:]], axis=2)


def _keypoint_names(path: Path, categories: list[_Category]) -> KeypointNames:
    """The keypoints of the categories, which those that have any must have in common."""
    named = [(category.name, category.keypoints, category.skeleton) for category in categories if category.keypoints]
    if not named:
        raise DataError(
            f"{path}: none of the categories has keypoints; take the file with keypoints, or leave them out"
        )
    first, keypoints, skeleton = named[0]
    other = next((name for name, found, _ in named if found != keypoints), None)
    if other is not None:
        raise DataError(f"{path}: {first} and {other} have different keypoints; choose one of them by `classes`")
    limbs = [(start - 1, end - 1) for start, end in skeleton or ()]
    return KeypointNames(list(keypoints or ()), find_flip_pairs(keypoints or ()), limbs)
