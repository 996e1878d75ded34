"""YOLO labels: a YAML file with folders and class names, and a text file of boxes for each image."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import Field

from paceline.core.arguments import CountOrZero, Requires
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.core.regular_file import open_regular, why_no_file
from paceline.core.text import join_first
from paceline.data.argument_types import Name
from paceline.data.batch import KeypointNames, Sample
from paceline.data.datasets.detection import BadBoxes, BoxObject, DetectionDataset, Problems, write_boxes
from paceline.data.datasets.instances import fill_outlines, with_masks
from paceline.data.datasets.keypoints import find_flip_pairs, known_keypoints
from paceline.data.fingerprint import DataDigest
from paceline.data.index.folders import files_below
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.io.image import EXTENSIONS

_UNIT = 1000  # boxes are checked in an image of this size, and kept as shares of it
_EXPECTED = "expected a class and the shares x, y, width, height of a box, or x, y of three points or more"
_ROUNDING = 0.01  # by which a point of an outline may lie outside its image
_NO_OUTLINE = "a box, where `masks: true` needs an outline"
_MOST = 0.9
_EXPECTED_SHAPE = "expected [keypoints, 2 or 3], such as [17, 3], or [0, 0] for outlines"
_MAX_CLASSES = 100_000
_COCO_PERSON = 17  # keypoints
_SAY_WHICH = "set `kpt_shape: [keypoints, 2 or 3]`, or `kpt_shape: [0, 0]` for outlines"

KeypointShape = Annotated[Sequence[CountOrZero], Field(min_length=2, max_length=2)]
"""How many keypoints follow each box, and how many numbers each of them has."""


@register.dataset("yolo", checks=[Requires("per_object", "keypoints")])
class Yolo(DetectionDataset):
    """The images of a split of a YOLO data set, in the order of their names, with the boxes of their label files.

    `file` is the YAML file with `path`, `train`, `val` and `names`. A split is a folder of images, a list of images, or
    several. The label file of images/…/a.jpg is labels/…/a.txt, or else lies beside the image. With `labels`, a folder
    in the root, it lies there, in as many of the image's folders as there are. An image without one has no objects. A
    line is a class and the center, width and height of a box as shares of the image, or the points of an outline, whose
    box is taken; with `masks`, its inside is the mask, and a line that is a box is bad (`bad_boxes`). `kpt_shape`, here
    or in the YAML file, says how many keypoints follow a box and how many numbers each has, where [0, 0] says that
    longer lines are outlines. Keypoints are passed over without `keypoints`; with `per_object`, each object that has
    some is a sample of its own, as pose networks take them. `flip_idx` and `kpt_names` of the YAML file are theirs.
    Files outside `root`, the folder of the YAML file unless given, are refused unless `follow_links`.
    """

    def __init__(
        self,
        file: Path,
        split: Name = "train",
        root: Path | None = None,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
        labels: Name | None = None,
        kpt_shape: KeypointShape | None = None,
        masks: bool = False,
        keypoints: bool = False,
        per_object: bool = False,
    ) -> None:
        self.file = Path(root or "", file)
        base = Path(root) if root is not None else self.file.parent
        inside = None if follow_links else base
        if kpt_shape is not None and not _is_keypoint_shape(list(kpt_shape)):
            raise ArgumentError("kpt_shape", f"{_EXPECTED_SHAPE}, got {list(kpt_shape)}")

        def build(builder: IndexBuilder) -> None:
            builder.watch(self.file, by_content=True)
            content = _read_yaml(self.file)
            names = _class_names(self.file, content)
            images = _find_images(self.file, base, content, split, inside, builder)
            files = _find_labels(self.file, images, None if labels is None else base / labels, builder)
            shape = content.get("kpt_shape") if kpt_shape is None else list(kpt_shape)
            if shape is not None and not _is_keypoint_shape(shape):
                raise DataError(f"{self.file}: `kpt_shape` is {shape!r:.60}; {_EXPECTED_SHAPE}")
            objects = _Lines(self.file, names, shape, masks).read(base, files)
            builder.facts["classes"] = names
            builder.append_texts("file", [os.fsencode(os.path.relpath(image, base)) for image in images])
            joints = _keypoint_names(self.file, content, shape) if keypoints else None
            builder.facts["keypoint_names"] = joints
            count = len(joints.names) if joints else 0
            write_boxes(builder, objects, np.full((len(images), 2), _UNIT), bad_boxes, count)

        if not self.file.is_file():
            raise DataError(f"{self.file}: {why_no_file(self.file)}; expected the YAML file of a YOLO data set")
        arguments = {"file": self.file.name, "split": split, "bad_boxes": bad_boxes, "links": follow_links}
        arguments |= {"labels": labels, "kpt_shape": kpt_shape and list(kpt_shape), "masks": masks}
        index = open_index(base, "yolo", arguments | {"keypoints": keypoints}, build)
        super().__init__(index, base, inside, self.file)
        self._outlines = index.rows("mask") if masks else None
        self.joints = KeypointNames.from_json(index.facts["keypoint_names"]) if keypoints else None
        if per_object:
            self._divide_by_object()

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and what is known of their objects."""
        digest.files(self._files.folder, self._files.names(self._part), "images")
        for name in ("starts", "boxes", "classes", "crowd", *(["keypoints"] if self.joints else [])):
            digest.array(name, self._index[name])

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size, and the boxes, classes and so on of its objects."""
        sample = super().open(index)
        height, width = sample["size"].tolist()
        if self.joints is not None:
            points = self._index["keypoints"][self._span(index)]
            sample["keypoints"] = points * np.array([width, height, 1], np.float32)
        boxes = sample["boxes"] / np.float32(_UNIT) * np.array([width, height, width, height], np.float32)
        sides = boxes[:, 2:] - boxes[:, :2]
        sample |= {"boxes": boxes, "area": sides[:, 0] * sides[:, 1]}
        if self._outlines is None:
            return sample
        which = self._span(index)
        shares = [
            np.frombuffer(self._outlines[place].tobytes(), np.float64) for place in range(which.start, which.stop)
        ]
        return with_masks(sample, fill_outlines(shares, height, width))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            content = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{path}: not YAML, or damaged ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected keys such as path, train, val and names")
    return content


def _class_names(path: Path, content: dict[str, Any]) -> list[str]:
    """The names, which are a list or numbered from 0; without any, those of `nc` classes."""
    names, count = content.get("names"), content.get("nc")
    if names is None and type(count) is int and 0 < count <= _MAX_CLASSES:
        return [f"class_{number}" for number in range(count)]
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
            lines = place.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
            names_in_list = [line.strip() for line in lines if line.strip()]
            for name in names_in_list:
                tried = [above / name.removeprefix("./") for above in (place.parent, place.parent.parent, base)]
                found[next((file for file in tried if file.exists()), tried[0])] = None
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


def _is_keypoint_shape(shape: Any) -> bool:
    if not isinstance(shape, list) or [type(number) for number in shape] != [int, int]:
        return False
    return shape == [0, 0] or (shape[0] > 0 and shape[1] in (2, 3))


def _keypoint_names(path: Path, content: dict[str, Any], shape: Sequence[int] | None) -> KeypointNames:
    """The keypoints as `kpt_names` calls them, or else as those of COCO's persons if there are 17, or by number.

    Those of left and right are a pair as `flip_idx` has them, or else as their names tell.
    """
    if not shape or not shape[0]:
        raise DataError(f"{path}: has no keypoints; {_SAY_WHICH.partition(',')[0]}, or leave out `keypoints`")
    count, flips, given = shape[0], content.get("flip_idx"), content.get("kpt_names")
    lists = list(given.values()) if isinstance(given, dict) else [given]
    known = known_keypoints(count) if count == _COCO_PERSON else None
    names = lists[0] if given else known.names if known else [str(number) for number in range(count)]
    if not isinstance(names, list) or len(names) != count or any(each != lists[0] for each in lists):
        raise DataError(f"{path}: `kpt_names` is {given!r:.60}, expected {count} names, the same for each class")
    if flips is not None and (not isinstance(flips, list) or sorted(flips, key=str) != sorted(range(count), key=str)):
        raise DataError(f"{path}: `flip_idx` is {flips!r:.60}, expected each number from 0 to {count - 1} once")
    names = [str(name) for name in names]
    pairs = [(place, other) for place, other in enumerate(flips or ()) if place < other]
    return KeypointNames(names, find_flip_pairs(names) if flips is None else pairs, known.limbs if known else [])


def _find_labels(path: Path, images: list[Path], folder: Path | None, builder: IndexBuilder) -> list[Path | None]:
    """The label file of each image; None for those that have none, which are noted."""
    if folder is not None and not folder.is_dir():
        raise DataError(f"{path}: {folder} is no folder; expected the label files in it, as `labels` says")
    known = set() if folder is None else set(files_below(folder, "", (".txt",), None, builder.watch))
    expected = [_label_file(image) if folder is None else _label_below(folder, image, known) for image in images]
    files = [file if file.exists() else None for file in expected]
    for wanted in expected:
        builder.watch(wanted if wanted.exists() else wanted.parent if wanted.parent.is_dir() else path)
    without = [image.name for image, file in zip(images, files, strict=True) if file is None]
    if len(without) == len(images):
        there = f"; {folder} has {join_first(sorted(known), 3) or 'no .txt files'}" if folder else ""
        found = f"no image has a label file: {images[0]} needs {expected[0]}{there}"
        raise DataError(f"{path}: {found}; give the folder of the label files as `labels`")
    if without:
        builder.note(f"{len(without):,} of {len(images):,} images have no label file: {join_first(without, 5)}")
    owners: dict[Path, Path] = {}
    for image, file in zip(images, files, strict=True):
        if folder is not None and file is not None and owners.setdefault(file, image) != image:
            advice = f"name it by the folders of its image too, as in {Path(image.parent.name, file.name)}"
            raise DataError(f"{file}: is the label file of {owners[file]} and of {image}; {advice}")
    return files


def _label_file(image: Path) -> Path:
    """Labels lie in `labels`, where images lie in the last folder called `images`; else beside them."""
    parts = list(image.parts)
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _label_below(folder: Path, image: Path, known: Collection[str]) -> Path:
    """The label file by the image's name, with as many of its folders as there are."""
    parts = image.with_suffix(".txt").parts
    names = ("/".join(parts[start:]) for start in range(len(parts)))
    return folder / next((name for name in names if name in known), parts[-1])


class _Lines:
    """Reads label files; all that is wrong with them is one DataError.

    Lines of pose data sets are as long as outlines may be. Without a shape of the keypoints, those that are no sensible
    outline are refused; and all of them if they are equally long and hardly any does not begin with a sound box.
    """

    def __init__(self, path: Path, names: list[str], shape: Sequence[int] | None, with_masks: bool = False) -> None:
        self._problems, self._names, self._shape = Problems(path), names, shape
        self._with_masks = with_masks
        self._lengths, self._num_outlines = set[int](), 0
        self._maybe_poses: list[str] = []

    def read(self, base: Path, files: Sequence[Path | None]) -> list[BoxObject]:
        """The objects in the label files of images, in their order."""
        objects = []
        for row, file in enumerate(files):
            text = "" if file is None else file.read_text(encoding="utf-8-sig", errors="replace")
            for number, line in enumerate(text.splitlines(), 1):
                place = f"{os.path.relpath(file or base, base)} line {number}"
                if line.strip() and (found := self._parse(line, place)) is not None:
                    label, box, outline, keypoints = found
                    corners, named = [_UNIT * each for each in box], f"{place} ({self._names[label]})"
                    flaw = _NO_OUTLINE if self._with_masks and not outline else ""
                    packed = np.array(outline, np.float64).tobytes() if self._with_masks else b""
                    objects.append(BoxObject(row, label, corners, named, False, packed, flaw, keypoints))
        if len(self._lengths) == 1 and len(self._maybe_poses) >= _MOST * self._num_outlines:
            for place in self._maybe_poses:
                self._problems.add(f"lines that may be outlines or boxes with keypoints ({_SAY_WHICH})", place)
        self._problems.refuse(_EXPECTED)
        return objects

    def _parse(self, line: str, place: str) -> tuple[int, list[float], list[float], list[float]] | None:
        """The class, the box's corners, the outline and the keypoints, as shares; None if it has a problem."""
        try:
            label, *numbers = map(float, line.split())
        except ValueError:
            label, numbers = 0.0, []
        problem = ""
        if len(numbers) < 4 or not all(map(math.isfinite, (label, *numbers))):
            problem, place = "lines that are no label", f"{place} ({line.strip()!r:.40})"
        elif not label.is_integer() or not 0 <= label < len(self._names):
            problem, place = f"classes that are not 0 to {len(self._names) - 1}", f"{place} ({label:g})"
        elif max(map(abs, numbers)) > 2:
            problem = "boxes in pixels, not as shares of the image"
        elif len(numbers) > 5:  # a fifth is how sure a detector was
            problem = self._problem_of_many(numbers, place)
        if problem:
            self._problems.add(problem, place)
            return None
        if len(numbers) > 5 and not any(self._shape or ()):
            box = [min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2])]
            return int(label), box, numbers, []
        x, y, width, height = numbers[:4]
        box = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
        return int(label), box, [], self._keypoints(numbers[4:])

    def _keypoints(self, numbers: list[float]) -> list[float]:
        """x, y and visibility of each keypoint; zeros where it is not labeled."""
        if len(numbers) < 2:
            return []
        columns = self._shape[1] if self._shape else 3
        found = []
        for place in range(0, len(numbers), columns):
            x, y, visibility, *_ = (*numbers[place : place + columns], 2.0)
            is_labeled = visibility > 0 and (columns == 3 or min(x, y) >= 0)
            found += [x, y, 1.0 if visibility == 1 else 2.0] if is_labeled else [0.0, 0.0, 0.0]
        return found

    def _problem_of_many(self, numbers: list[float], place: str) -> str:
        """What is wrong with more numbers than a box has: the points of an outline, or a box and its keypoints."""
        count, is_outline = len(numbers), len(numbers) % 2 == 0
        if self._shape is not None and any(self._shape):
            expected = 4 + self._shape[0] * self._shape[1]
            return "" if count == expected else f"lines without the {1 + expected} numbers that `kpt_shape` asks for"
        if self._shape is None:
            is_inside = min(numbers) >= -_ROUNDING and max(numbers) <= 1 + _ROUNDING
            if (is_outline and not is_inside) or (not is_outline and (count - 4) % 3 == 0):
                return f"lines that are no outlines, but maybe boxes with keypoints ({_SAY_WHICH})"
            self._lengths.add(count)
            self._num_outlines += 1
            x, y, width, height = numbers[:4]
            if abs(2 * x - 1) + width <= 1 + _ROUNDING and abs(2 * y - 1) + height <= 1 + _ROUNDING:
                self._maybe_poses.append(place)
        return "" if is_outline else "lines that are no label"
