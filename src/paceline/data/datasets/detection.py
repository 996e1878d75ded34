"""What all formats of boxes share: samples from an index, boxes checked against their images, problems collected."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular
from paceline.core.text import join_first, pluralize
from paceline.data.batch import Sample
from paceline.data.fingerprint import DataDigest
from paceline.data.index.folders import FileDataset, NamedFiles
from paceline.data.index.index import IndexBuilder, drawn_part
from paceline.data.io.image import Encoded
from paceline.data.mapped_arrays import ArrayWriter, MappedArrays

BadBoxes = Literal["stop", "drop", "clip"]
"""What to do about boxes that do not lie in their image, and about masks that cannot be read or cover nothing.

`stop` refuses the data set, `drop` leaves all of them out; `clip` cuts those that are partly outside to the image, and
leaves out what is empty, inverted or wholly outside, or has a bad mask.
"""

PARTLY_OUTSIDE = "partly outside its image"
_FLAWS = ("", PARTLY_OUTSIDE, "outside its image", "empty", "inverted", "with a bad mask")
_PARTLY_OUTSIDE, _BAD_MASK = 1, 5
_ROUNDING = 0.01  # pixels over the border that are cut off without a word: numbers are written with few digits
_MAX_NAMES = 5
_MAX_KINDS = 12


class DetectionDataset(FileDataset):
    """Images and their objects, from an index with the arrays "file" and those of `write_objects`.

    `annotations` is the file that all objects are in.
    """

    _chosen: NDArray[np.int64] | None = None
    """The object of each sample, where each object is one."""

    def __init__(
        self,
        index: MappedArrays,
        folder: Path,
        inside: Path | None,
        annotations: Path,
        split: str | None = None,
        shares: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.annotations = annotations
        self.classes: list[str] = index.facts["classes"]
        self.notes: list[str] = index.facts["notes"]
        self._index = index
        self._files = NamedFiles(index, "file", folder, inside)
        self._part = drawn_part(len(self._files), split, shares, seed)

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and the content of the annotations."""
        digest.content(self.annotations)
        digest.files(self._files.folder, self._files.names(self._part), "images")

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size, and the boxes, classes, crowd flags and areas of its objects."""
        row = int(self._part[index])
        image = Encoded.read(self._files.checked(row))
        size = np.array([image.height, image.width], np.int64)
        which = self._span(index)
        return {
            "image": image,
            "boxes": self._index["boxes"][which].copy(),
            "classes": self._index["classes"][which].astype(np.int64),
            "crowd": self._index["crowd"][which].astype(np.bool_),
            "area": self._index["area"][which].copy(),
            "size": size,
        }

    def count_objects(self) -> int:
        """How many objects there are to learn from, which crowds are not."""
        if self._chosen is not None:
            return len(self._chosen)
        before = np.concatenate([[0], np.cumsum(self._index["crowd"] == 0)])
        starts, rows = self._index["starts"].astype(np.int64), np.asarray(self._part)
        return int((before[starts[rows + 1]] - before[starts[rows]]).sum())

    def _span(self, index: int) -> slice:
        """The rows of a sample's objects."""
        if self._chosen is not None:
            return slice(int(self._chosen[index]), int(self._chosen[index]) + 1)
        row = int(self._part[index])
        return slice(*self._index["starts"][row : row + 2].tolist())

    def _divide_by_object(self) -> None:
        """Make each object with labeled keypoints a sample of its own; crowds are left out."""
        starts, rows = self._index["starts"].astype(np.int64), np.asarray(self._part)
        objects = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        owners = np.repeat(rows, starts[rows + 1] - starts[rows])
        is_labeled = (self._index["keypoints"][objects, :, 2] > 0).any(1)
        kept = is_labeled & (self._index["crowd"][objects] == 0)
        self._part, self._chosen = owners[kept], objects[kept]


class BoxObject(NamedTuple):
    """An object as it is written: the row of its image, the number of its class, its corners, and the place."""

    image: int
    label: int
    box: Sequence[float]
    place: str
    is_crowd: bool = False
    mask: bytes = b""
    """What an index keeps of its mask."""
    mask_flaw: str = ""
    """What is wrong with that, if anything is."""
    keypoints: Sequence[float] = ()
    """x, y and visibility of each."""


def write_objects(
    writer: ArrayWriter,
    num_images: int,
    images: NDArray[np.int64],
    boxes: NDArray[np.float32],
    classes: NDArray[np.int64],
    crowd: NDArray[np.bool_],
    area: NDArray[np.float32] | None = None,
) -> None:
    """Write objects into an index, given the image of each, in rising order.

    `crowd` are those that are no single object, or too difficult to count: predictions of them are neither right nor
    wrong. An area that is not given is that of the box.
    """
    sides = boxes[:, 2:] - boxes[:, :2]
    writer.append("starts", np.searchsorted(images, np.arange(num_images + 1)))
    writer.append("boxes", boxes)
    writer.append("classes", classes)
    writer.append("crowd", crowd.astype(np.uint8))
    writer.append("area", sides[:, 0] * sides[:, 1] if area is None else area)


def write_boxes(
    builder: IndexBuilder,
    objects: Sequence[BoxObject],
    sizes: NDArray[np.int64],
    policy: BadBoxes,
    num_keypoints: int = 0,
) -> None:
    """Write objects, in the order of their images, whose heights and widths are `sizes` [N, 2]; bad boxes are noted."""
    images = np.array([each.image for each in objects], np.int64)
    boxes = np.array([each.box for each in objects], np.float64).reshape(-1, 4)
    mask_flaws = [each.mask_flaw for each in objects]
    checked = check_boxes(boxes, sizes[images], policy, lambda number: objects[number].place, mask_flaws)
    for note in checked.notes:
        builder.note(note)
    kept = checked.kept
    labels = np.array([each.label for each in objects], np.int64)[kept]
    is_crowd = np.array([each.is_crowd for each in objects], np.bool_)[kept]
    write_objects(builder, len(sizes), images[kept], checked.boxes, labels, is_crowd)
    builder.append_texts("mask", [objects[number].mask for number in np.flatnonzero(kept).tolist()])
    if num_keypoints:
        values = [objects[row].keypoints or [0.0] * 3 * num_keypoints for row in np.flatnonzero(kept).tolist()]
        builder.append("keypoints", np.array(values, np.float32).reshape(-1, num_keypoints, 3))


class CheckedBoxes(NamedTuple):
    """Boxes that are sound: float32 [K, 4] as x1 y1 x2 y2, which of the given ones they are, and what was wrong."""

    boxes: NDArray[np.float32]
    kept: NDArray[np.bool_]
    notes: list[str]


def check_boxes(
    boxes: NDArray[np.float64],
    sizes: NDArray[np.int64],
    policy: BadBoxes,
    place: Callable[[int], str],
    mask_flaws: Sequence[str] = (),
) -> CheckedBoxes:
    """Boxes [K, 4] that lie in their images, whose heights and widths are `sizes` [K, 2].

    `place` says where box k is written; `mask_flaws` what is wrong with each mask, "" for nothing.
    """
    with np.errstate(over="ignore"):  # far outside is outside
        exact, extents = boxes.astype(np.float32), boxes[:, 2:] - boxes[:, :2]
    clipped = np.clip(exact, 0, sizes[:, [1, 0, 1, 0]].astype(np.float32))
    flaws = np.zeros(len(boxes), np.int8)
    flaws[(abs(clipped - exact) > _ROUNDING).any(1)] = _PARTLY_OUTSIDE
    flaws[(clipped[:, 2:] <= clipped[:, :2]).any(1)] = 2
    flaws[(extents == 0).any(1) | (exact[:, 2:] == exact[:, :2]).any(1)] = 3
    flaws[(extents < 0).any(1)] = 4
    for box, flaw in enumerate(mask_flaws):
        if flaw and flaws[box] <= _PARTLY_OUTSIDE:
            flaws[box] = _PARTLY_OUTSIDE if flaw == PARTLY_OUTSIDE else _BAD_MASK
    found = np.flatnonzero(flaws)
    kept = flaws <= _PARTLY_OUTSIDE if policy == "clip" else flaws == 0
    if not len(found):
        return CheckedBoxes(clipped, kept, [])
    counts = _counts(flaws)

    def described(box: int) -> str:
        return f"{place(box)}: {mask_flaws[box] if flaws[box] == _BAD_MASK else _FLAWS[flaws[box]]}"

    if policy == "stop":
        lines = (described(box) for box in found.tolist())
        advice = "repair them, or set `bad_boxes: clip` or `bad_boxes: drop`"
        raise DataError("; ".join([counts, *at_most(lines, len(found), 10), advice]))
    lines = (f"{described(box)}, {'clipped' if kept[box] else 'left out'}" for box in found.tolist())
    return CheckedBoxes(clipped[kept], kept, [counts, *at_most(lines, len(found))])


def _counts(flaws: NDArray[np.int8]) -> str:
    each = [f"{count:,} {flaw}" for flaw, count in zip(_FLAWS, np.bincount(flaws), strict=False) if flaw and count]
    number = np.count_nonzero(flaws)
    return f"{number:,} of {len(flaws):,} boxes {'is' if number == 1 else 'are'} bad: {', '.join(each)}"


def at_most(lines: Iterable[str], total: int, most: int = 100) -> list[str]:
    """The first of `total` lines, and how many more there are."""
    first = list(islice(lines, most))
    return [*first, f"and {total - most:,} more"] if total > most else first


class Problems:
    """Collects what is wrong with annotations, equal problems together, so that one message names all of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, list[str]] = {}

    def add(self, what: str, place: str) -> None:
        """Something that is wrong, and where; only the first places are kept in mind by whoever reads the message."""
        self._places.setdefault(what, []).append(place)

    def refuse(self, advice: str = "repair the file") -> None:
        """Raise DataError if there is any problem."""
        if not self._places:
            return
        kinds = [f"{what}: {join_first(places, _MAX_NAMES)}" for what, places in self._places.items()]
        total = pluralize(sum(map(len, self._places.values())), "problem")
        raise DataError(f"{self._path}: {'; '.join([total, *at_most(kinds, len(kinds), _MAX_KINDS)])}; {advice}")


def class_index(path: Path, found: Iterable[tuple[str, str]], given: Iterable[str] | None) -> dict[str, int]:
    """The number of each class name: those that are given, in their order, or those found, sorted.

    With the places of the found ones, of which those that are not given are a DataError.
    """
    found = list(found)
    names = list(given) if given else sorted({name for name, _ in found})
    if not names:
        raise DataError(f"{path}: no annotation has an object, so the classes are not known; give them as `classes`")
    numbers, problems = {name: number for number, name in enumerate(names)}, Problems(path)
    for name, place in found:
        if name not in numbers:
            problems.add(f"the class {name!r} is not in `classes`", place)
    problems.refuse(f"`classes` has {', '.join(names)}")
    return numbers


def finite_or_nan(text: str) -> float:
    """The number that a text is; NaN if it is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def list_names(folder: Path, builder: IndexBuilder, expected: str) -> list[str]:
    """The names of what is in a folder, sorted."""
    try:
        builder.watch(folder)
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is needed
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}); expected {expected}") from error


def read_names(
    path: Path, known: Collection[str], builder: IndexBuilder, advice: str, normalize: Callable[[str], str] = str
) -> list[str]:
    """The names in a text file, one a line, all of which must be known."""
    try:
        builder.watch(path)
        with open_regular(path) as file:
            lines = file.read().decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read as text ({why}); {advice}") from error
    names = [(number, normalize(line.strip())) for number, line in enumerate(lines, 1) if line.strip()]
    problems = Problems(path)
    for number, name in names:
        if name not in known:
            problems.add("names that have no annotation", f"{name} (line {number})")
    problems.refuse(f"expected one name a line, such as {next(iter(known))}")
    if not names:
        raise DataError(f"{path}: names no images")
    return [name for _, name in names]
