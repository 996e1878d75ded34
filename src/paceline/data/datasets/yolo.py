"""YOLO labels: a YAML file with folders and class names, and a text file of boxes for each image."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceline.core.arguments import Count
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import open_regular, why_no_file
from paceline.core.text import join_first
from paceline.data.argument_types import Name
from paceline.data.batch import Sample
from paceline.data.datasets.detection import BadBoxes, DetectionDataset, Problems, write_checked_objects
from paceline.data.index.folders import files_below
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.io.image import EXTENSIONS, MAX_PIXELS

_UNIT = 1000  # boxes are checked in an image of this size, and kept as shares of it
_EXPECTED = "expected a class and the shares x, y, width, height of a box, or x, y of three points or more"


@register.dataset("yolo")
class Yolo(DetectionDataset):
    """The images of a split of a YOLO data set, in the order of their names, with the boxes of their label files.

    `file` is the YAML file with `path`, `train`, `val` and `names`. A split is a folder of images, a list of images, or
    several. The label file of images/…/a.jpg is labels/…/a.txt, or else lies beside the image; an image without one
    has no objects. A line is a class and the center, width and height of a box as shares of the image, or the points
    of an outline, whose box is taken. Files outside `root`, the folder of the YAML file unless given, are refused
    unless `follow_links`.
    """

    def __init__(
        self,
        file: Path,
        split: Name = "train",
        root: Path | None = None,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
    ) -> None:
        self.file = Path(root or "", file)
        base = Path(root) if root is not None else self.file.parent
        inside = None if follow_links else base

        def build(builder: IndexBuilder) -> None:
            builder.watch(self.file, by_content=True)
            content = _read_yaml(self.file)
            names = _class_names(self.file, content.get("names"))
            images = _find_images(self.file, base, content, split, inside, builder)
            _write(builder, self.file, base, names, images, bad_boxes)

        if not self.file.is_file():
            raise DataError(f"{self.file}: {why_no_file(self.file)}; expected the YAML file of a YOLO data set")
        arguments = {"file": self.file.name, "split": split, "bad_boxes": bad_boxes, "links": follow_links}
        index = open_index(base, "yolo", arguments, build)
        super().__init__(index, base, inside, max_pixels, None, None)

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size, and the boxes, classes, crowd flags and areas of its objects."""
        sample = super().open(index)
        height, width = sample["size"].tolist()
        boxes = sample["boxes"] / np.float32(_UNIT) * np.array([width, height, width, height], np.float32)
        sides = boxes[:, 2:] - boxes[:, :2]
        return {**sample, "boxes": boxes, "area": sides[:, 0] * sides[:, 1]}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            content = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{path}: not YAML, or damaged ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected keys such as path, train, val and names")
    return content


def _class_names(path: Path, names: Any) -> list[str]:
    """The names, which are a list or numbered from 0."""
    if isinstance(names, dict) and sorted(names, key=str) == sorted(range(len(names)), key=str):
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or not names or not all(isinstance(name, str | int) for name in names):
        raise DataError(
            f"{path}: `names` is {names!r:.60}, expected a list of class names, or one for each number from 0"
        )
    return [str(name) for name in names]


def _find_images(
    path: Path, base: Path, content: dict[str, Any], split: str, inside: Path | None, builder: IndexBuilder
) -> list[Path]:
    entries = content.get(split)
    if not entries:
        known = ", ".join(key for key in content if key in ("train", "val", "test", "valid", "minival")) or "no splits"
        raise DataError(f"{path}: has no split {split!r}; it has {known}")
    found: dict[Path, None] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        place = _place(path, base, str(content.get("path") or ""), str(entry))
        if place.is_dir():
            names = files_below(place, "", EXTENSIONS, inside, builder.watch)
            found |= dict.fromkeys(place / name for name in sorted(names))
        else:
            builder.watch(place, by_content=True)
            lines = place.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
            names_in_list = [line.strip() for line in lines if line.strip()]
            parents = [place.parent, place.parent.parent, base]
            found |= dict.fromkeys(_first(parents, name.removeprefix("./")) for name in names_in_list)
    if not found:
        raise DataError(f"{path}: no images in {entries}; expected files with the extensions {' '.join(EXTENSIONS)}")
    return list(found)


def _place(path: Path, base: Path, root: str, entry: str) -> Path:
    """What a split names: below `path`, as the YAML file has it, or below the data's own folder."""
    plain = entry
    while plain.startswith("../"):  # as exports have it, whose YAML file lies one folder higher than it says
        plain = plain.removeprefix("../")
    tried = [base / root / entry, base / entry, base / root / plain, base / plain]
    found = next((place for place in tried if place.exists()), None)
    if found is None:
        advice = "correct `path` there, or give the folder of the data as `root`"
        raise DataError(f"{path}: {entry} is neither {tried[0]} nor {tried[-1]}; {advice}")
    return found


def _first(folders: Sequence[Path], name: str) -> Path:
    return next((folder / name for folder in folders if (folder / name).exists()), folders[0] / name)


def _label_file(image: Path) -> Path:
    """Labels lie in `labels`, where images lie in the last folder called `images`; else beside them."""
    parts = list(image.parts)
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _write(
    builder: IndexBuilder, path: Path, base: Path, names: list[str], images: list[Path], bad_boxes: BadBoxes
) -> None:
    problems, rows, boxes, labels, places = Problems(path), list[int](), list[list[float]](), list[int](), list[str]()
    without = []
    for row, image in enumerate(images):
        file = _label_file(image)
        builder.watch(file.parent if not file.exists() and file.parent.is_dir() else file if file.exists() else path)
        if not file.exists():
            without.append(image.name)
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if not line.strip():
                continue
            place = f"{os.path.relpath(file, base)} line {number}"
            found = _parse(line, len(names), problems, place)
            if found is not None:
                rows.append(row)
                labels.append(found[0])
                boxes.append(found[1])
                places.append(f"{place} ({names[found[0]]})")
    problems.refuse(_EXPECTED)
    if len(without) == len(images):
        raise DataError(f"{path}: no image has a label file: {images[0]} needs {_label_file(images[0])}")
    if without:
        builder.note(f"{len(without):,} of {len(images):,} images have no label file: {join_first(without, 5)}")
    corners = np.array(boxes, np.float64).reshape(-1, 4) * _UNIT
    sizes = np.full((len(corners), 2), _UNIT, np.int64)
    builder.facts["classes"] = names
    builder.append_texts("file", [os.fsencode(os.path.relpath(image, base)) for image in images])
    owners, classes, extents = np.array(rows, np.int64), np.array(labels, np.int64), corners[:, 2:] - corners[:, :2]
    write_checked_objects(builder, len(images), owners, corners, extents, sizes, classes, bad_boxes, places.__getitem__)


def _parse(line: str, num_classes: int, problems: Problems, place: str) -> tuple[int, list[float]] | None:
    """The class and the corners of the box in a line, as shares of the image; None if something is wrong with it."""
    try:
        values = [float(word) for word in line.split()]
    except ValueError:
        values = []
    if len(values) < 5 or (len(values) not in (5, 6) and len(values) % 2 == 0) or not all(map(math.isfinite, values)):
        problems.add("lines that are no label", f"{place} ({line.strip()!r:.40})")
        return None
    label, points = int(values[0]), values[1:]
    if label != values[0] or not 0 <= label < num_classes:
        problems.add(f"classes that are not 0 to {num_classes - 1}", f"{place} ({values[0]:g})")
        return None
    if max(map(abs, points)) > 2:
        problems.add("boxes in pixels, not as shares of the image", place)
        return None
    if len(points) < 6:  # a fifth number is how sure a detector was
        x, y, width, height = points[:4]
        return label, [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    return label, [min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])]
