"""COCO's JSON files: categories, images and annotations, checked and written into an index, column by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from paceline.core.arguments import Count
from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular
from paceline.data.batch import KeypointNames
from paceline.data.datasets.detection import BadBoxes, Problems, check_boxes, write_objects
from paceline.data.datasets.instances import pack_outlines
from paceline.data.datasets.keypoints import find_flip_pairs
from paceline.data.index.index import IndexBuilder
from paceline.data.index.list_file import encode_name
from paceline.data.io.json_file import JsonLists, json_errors, parse_piece

_MAX_SIZE = 1 << 31  # pixels


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


@dataclass(slots=True)
class _OutlinedAnnotation(_Annotation):
    segmentation: Any = None


class Annotations(NamedTuple):
    """Annotations, one a row, in the order of the file."""

    id: NDArray[np.int64]
    image_id: NDArray[np.int64]
    category_id: NDArray[np.int64]
    bbox: NDArray[np.float64]
    area: NDArray[np.float64]
    crowd: NDArray[np.bool_]
    keypoints: Sequence[NDArray[np.float64]] = ()
    """If wanted; as long as they are written."""
    masks: Sequence[bytes] = ()
    """If wanted, packed run lengths."""
    mask_flaws: Sequence[str] = ()
    """What is wrong with each mask, "" for nothing."""


class CocoFile:
    """The categories, images and annotations of a file; all that is wrong with them is one DataError."""

    def __init__(self, path: Path, with_masks: bool, with_keypoints: bool) -> None:
        self.path, self._problems = path, Problems(path)
        self._with_masks, self._with_keypoints = with_masks, with_keypoints
        self.notes: list[str] = []
        self._wrong: dict[str, set[str]] = {"category": set(), "image": set(), "annotation": set()}
        """The ids of the entries that have a problem."""
        self._without_id: list[int] = []
        with json_errors(path), open_regular(path) as file:
            lists = JsonLists(file)
            parts, content = ("categories", "images", "annotations"), lists.content
            found = content if isinstance(content, dict) else {}
            lacking = [name for name in parts if not isinstance(found.get(name), list)]
            if lacking:
                expected = f"expected an object with the lists {', '.join(parts)}"
                raise DataError(f"{path}: has no list {', '.join(map(repr, lacking))}; {expected}")
            self.categories: dict[int, _Category] = self._read_by_id(lists, "categories", "category", _Category)
            self.images: dict[int, _Image] = self._read_by_id(lists, "images", "image", _Image)
            kind = _OutlinedAnnotation if with_masks else _Annotation
            read = [self._columns(found) for found in self._read(lists, "annotations", "annotation", kind)]
        self.annotations = Annotations(*map(_join, zip(*read, strict=True)))
        if not self._without_id:
            self._check_unique("annotation", self.annotations.id)
        self._check_references("category", self.categories, self.annotations.category_id)
        self._check_references("image", self.images, self.annotations.image_id)
        self._problems.refuse()

    def _read_by_id(self, lists: JsonLists, key: str, kind: str, entry_type: type[Any]) -> dict[int, Any]:
        """The entries of a list, in the order of their ids."""
        entries = [each for found in self._read(lists, key, kind, entry_type) for each in found]
        if not entries and not self._wrong[kind]:
            raise DataError(f"{self.path}: the list {key!r} is empty")
        self._check_unique(kind, np.array([each.id for each in entries], np.int64))
        return {each.id: each for each in sorted(entries, key=lambda each: each.id)}

    def _read(self, lists: JsonLists, key: str, kind: str, entry_type: type[Any]) -> Iterator[list[Any]]:
        """The entries of a list, piece by piece; wrong ones are problems."""
        adapter, count = TypeAdapter(list[entry_type]), 0  # type: ignore[valid-type]
        for piece, start in lists.pieces(key):
            try:
                found = adapter.validate_json(piece)
                count += len(found)
            except ValidationError:
                entries = parse_piece(piece, start)
                found = self._read_each(kind, entries, entry_type, count)
                count += len(entries)
            yield found
        if self._without_id and len(self._without_id) == count:
            self.notes.append("annotations have no 'id'; they are numbered in the order of the file")
        for place in self._without_id if len(self._without_id) < count else ():
            self._problems.add("annotation has no 'id'", f"number {place} of the list")

    def _read_each(self, kind: str, entries: list[Any], entry_type: type[Any], count: int) -> list[Any]:
        """The entries that have no problem, where `count` come before them."""
        if kind == "annotation":
            self._refuse_panoptic(entries[0] if entries else None)
            without_id = [place for place, entry in enumerate(entries) if isinstance(entry, dict) and "id" not in entry]
            for place in without_id:
                entries[place] = {"id": count + place + 1, **entries[place]}
                self._without_id.append(count + place + 1)
        adapter, found = TypeAdapter(entry_type), []
        for place, entry in enumerate(entries, count + 1):
            written = entry.get("id") if isinstance(entry, dict) else None
            name = f"number {place} of the list" if written is None else f"{written!s:.60}"
            try:
                found.append(adapter.validate_python(entry))
            except ValidationError as error:
                self._add_problem(kind, name, entry, error)
                self._wrong[kind].add(name)
        return found

    def _refuse_panoptic(self, entry: Any) -> None:
        if isinstance(entry, dict) and "segments_info" in entry and "bbox" not in entry:
            what = "a panoptic file: its annotations have 'segments_info' and no 'bbox'"
            advice = "take the file of instances, or the masks as images with `dataset: image_mask`"
            raise DataError(f"{self.path}: {what}; {advice}")

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

    def _columns(self, found: Sequence[Any]) -> Annotations:
        masks, flaws = self._pack_masks(found) if self._with_masks else ((), ())
        return Annotations(
            np.array([each.id for each in found], np.int64),
            np.array([each.image_id for each in found], np.int64),
            np.array([each.category_id for each in found], np.int64),
            np.array([each.bbox for each in found], np.float64).reshape(-1, 4),
            np.array([each.bbox[2] * each.bbox[3] if each.area is None else each.area for each in found], np.float64),
            np.array([each.iscrowd for each in found], np.bool_),
            [np.array(each.keypoints or (), np.float64) for each in found] if self._with_keypoints else (),
            masks,
            flaws,
        )

    def _pack_masks(self, found: Sequence[_OutlinedAnnotation]) -> tuple[list[bytes], list[str]]:
        nowhere = _Image(0, "?", 1, 1)  # a missing image is reported by its id
        images = [self.images.get(each.image_id, nowhere) for each in found]
        return pack_outlines([each.segmentation for each in found], [(each.height, each.width) for each in images])

    def _check_unique(self, kind: str, ids: NDArray[np.int64]) -> None:
        numbers, counts = np.unique(ids, return_counts=True)
        for number in np.repeat(numbers, counts - 1).tolist():
            self._problems.add(f"{kind} has the same id as another", str(number))

    def _check_references(self, kind: str, known: Mapping[int, Any], found: NDArray[np.int64]) -> None:
        """Add the annotations whose category or image is not in the file, not even as a wrong entry."""
        distinct = [number for number in np.unique(found) if number not in known]
        unknown = [number for number in distinct if str(number) not in self._wrong[kind]]
        for row in np.flatnonzero(np.isin(found, unknown)).tolist():
            what = f"annotation has a {kind}_id that no {kind} has"
            self._problems.add(what, f"{self.annotations.id[row]} ({found[row]})")

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

    def write(self, builder: IndexBuilder, chosen: list[_Category], keep_empty: bool, bad_boxes: BadBoxes) -> None:
        """Write the images and the objects of the chosen categories."""
        names = _keypoint_names(self.path, chosen) if self._with_keypoints else None
        rows, others = self._rows_of(chosen)
        found = self.annotations
        files = list(self.images.values())
        images = np.searchsorted(list(self.images), found.image_id[rows])
        sizes = np.array([(image.height, image.width) for image in files], np.int64)
        corners = found.bbox[rows]
        corners[:, 2:] += corners[:, :2]

        def place(box: int) -> str:
            row = rows[box]
            name = self.categories[int(found.category_id[row])].name
            values = " ".join(f"{value:g}" for value in found.bbox[row])
            return f"{self.path}: annotation {found.id[row]} ({name}, {files[images[box]].file_name}), bbox {values}"

        flaws = [found.mask_flaws[row] for row in rows] if self._with_masks else ()
        checked = check_boxes(corners, sizes[images], bad_boxes, place, flaws)
        left_out = [f"{self.path}: {others:,} annotations of other classes are left out"] if others else []
        builder.facts["notes"] += [*self.notes, *checked.notes, *left_out]
        rows, images = rows[checked.kept], images[checked.kept]
        used = np.arange(len(files)) if keep_empty else np.unique(images)
        if not len(used):
            wanted = ", ".join(each.name for each in chosen)
            raise DataError(f"{self.path}: no image has an object of the classes {wanted}")
        builder.append_texts("file", [encode_name(self.path, 0, files[row].file_name) for row in used])
        ids = [category.id for category in chosen]
        classes = np.argsort(ids)[np.searchsorted(ids, found.category_id[rows], sorter=np.argsort(ids))]
        area = found.area[rows].astype(np.float32)
        crowd, owners = found.crowd[rows], np.searchsorted(used, images)
        write_objects(builder, len(used), owners, checked.boxes, classes, crowd, area)
        builder.append("sizes", sizes[used])
        builder.append("image_ids", np.array([files[row].id for row in used], np.int64))
        if self._with_masks:
            builder.append_texts("mask", [found.masks[row] for row in rows])
        if names is not None:
            builder.append("keypoints", self._read_keypoints(rows, len(names.names)))
        words = [each.name for each in chosen]
        builder.facts |= {"classes": words, "category_ids": ids, "keypoint_names": names}

    def _rows_of(self, chosen: list[_Category]) -> tuple[NDArray[np.int64], int]:
        """The annotations of these categories, by image, and how many others there are."""
        rows = np.flatnonzero(np.isin(self.annotations.category_id, [category.id for category in chosen]))
        order = np.argsort(self.annotations.image_id[rows], kind="stable")
        return rows[order], len(self.annotations.id) - len(rows)

    def _read_keypoints(self, rows: NDArray[np.int64], count: int) -> NDArray[np.float32]:
        """x, y and visibility of each annotation's keypoints, [M, J, 3], in the middles of their pixels."""
        read = np.zeros((len(rows), 3 * count), np.float32)
        for place, row in enumerate(rows.tolist()):
            values = self.annotations.keypoints[row]
            if not len(values):
                continue
            if len(values) != 3 * count or not {0, 1, 2}.issuperset(values[2::3].tolist()):
                expected = f"{count} times x, y and a visibility of 0, 1 or 2"
                name = f"{self.annotations.id[row]} ({values.tolist()!r:.60})"
                self._problems.add(f"annotation has keypoints that are not {expected}", name)
            else:
                read[place] = values
        self._problems.refuse()
        keypoints = read.reshape(len(rows), count, 3)
        is_labeled = keypoints[..., 2:] > 0
        positions = np.where(is_labeled, keypoints[..., :2] + np.float32(0.5), np.float32(0))
        return np.concatenate([positions, keypoints[..., 2:]], axis=2)


def _join(pieces: Sequence[Any]) -> Any:
    """A column of annotations from its pieces."""
    return np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else [row for piece in pieces for row in piece]


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
