"""Photos of one person each, and that person's joints in one file for all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.batch import JointNames, Sample
from paceline.data.datasets.joints_file import JointsFile, read_joints
from paceline.data.joint_names import known_joints, mirrored_pairs
from paceline.data.objects import at_most, drawn_part
from paceline.data.reading.decode import MAX_PIXELS
from paceline.data.reading.image_files import EXTENSIONS, ImageFiles, packed_names


class Joints:
    """The images root/images/ with the joints of root/joints.npy, a row for each, by name.

    A json file names its images itself. Coordinates are taken as they are, in pixels from the left upper corner. The
    third column is 0 for what is not labelled and 1 for what is, or 0, 1 hidden and 2 visible. A person's box holds
    all labelled joints and a margin, a share of its longer side, and is cut at the image's border. 14 joints are taken
    as those of the Leeds sports pose sets and 17 as COCO's unless `names` calls them otherwise. A split is a list of
    images, root/<split>.txt, or drawn with `split_shares`.
    """

    channels = 3

    def __init__(
        self,
        root: Path,
        joints: str = "joints.npy",
        images: str = "images",
        split: str | None = None,
        split_shares: Mapping[str, float] | None = None,
        split_seed: int = 0,
        margin: float = 0.1,
        names: Sequence[str] | None = None,
        pairs: Sequence[Sequence[int]] | None = None,
        limbs: Sequence[Sequence[int]] | None = None,
        follow_links: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        root = Path(root)
        path, folder = root / joints, root / images
        found = read_joints(path)
        self.classes = ["person"]
        self.joints = _named(path, found, names, pairs, limbs)
        image_names = found.images or _image_names(path, folder, len(found.positions))
        self._rows = _rows(root, image_names, split, split_shares, split_seed)
        self._files = ImageFiles(root, folder, *packed_names(folder, image_names), follow_links, max_pixels)
        self._positions = found.positions
        self._boxes = _boxes(found.positions, margin)
        self.notes = _notes(path, image_names, self._rows, self._boxes)

    def __len__(self) -> int:
        return len(self._rows)

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        return self._files.path(int(self._rows[index]))

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size, and the joints and box of its person, if any is labelled."""
        row = int(self._rows[index])
        image = self._files.open(row)
        box = np.clip(self._boxes[row], 0, np.array([image.width, image.height] * 2, np.float32))
        width, height = box[2:] - box[:2]
        count = int(not np.isnan(box[0]))
        if count and min(width, height) <= 0:
            size = f"{image.width}×{image.height}"
            raise DataError(f"{self._files.path(row)}: all of its joints lie outside the image, which is {size}")
        return {
            "image": image,
            "boxes": box[None][:count],
            "classes": np.zeros(count, np.int64),
            "keypoints": self._positions[row : row + count].copy(),
            "crowd": np.zeros(count, np.bool_),
            "area": np.array([width * height], np.float32)[:count],
            "size": np.array([image.height, image.width], np.int64),
        }

    def read(self, index: int) -> Sample:
        """The same with the image decoded, uint8 [H, W, 3]."""
        sample = self.open(index)
        return {**sample, "image": sample["image"].decode()}


def _named(
    path: Path,
    found: JointsFile,
    names: Sequence[str] | None,
    pairs: Sequence[Sequence[int]] | None,
    limbs: Sequence[Sequence[int]] | None,
) -> JointNames:
    """The joints as the recipe calls them, or else the file, or else as they are known by their number."""
    count = found.positions.shape[1]
    known = known_joints(count)
    called = list(names or found.names or (known.names if known else ()))
    if len(called) != count:
        given = f"`names` has {len(called)}" if names else "their names are not known: give them as `names`"
        raise DataError(f"{path}: has {count} joints, but {given}")
    is_known = known is not None and called == known.names
    for key, given_pairs in (("pairs", pairs), ("limbs", limbs)):
        wrong = [pair for pair in given_pairs or () if not all(0 <= end < count for end in pair)]
        if wrong:
            raise DataError(f"{path}: has {count} joints, numbered from 0, but `{key}` has {list(wrong[0])}")
    mirrored = pairs if pairs is not None else found.pairs if not names else None
    joined = limbs if limbs is not None else known.limbs if known is not None and is_known else ()
    return JointNames(
        called,
        mirrored_pairs(called) if mirrored is None else [(pair[0], pair[1]) for pair in mirrored],
        [(limb[0], limb[1]) for limb in joined],
    )


def _image_names(path: Path, folder: Path, count: int) -> list[str]:
    """The images in a folder, sorted, of which there must be one for each row."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.lower().endswith(EXTENSIONS))  # noqa: PTH208
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}); expected the images") from error
    if len(names) != count:
        raise DataError(f"{path}: has joints for {count:,} images, but {folder} has {len(names):,} images")
    return names


def _rows(
    root: Path, images: list[str], split: str | None, shares: Mapping[str, float] | None, seed: int
) -> NDArray[np.int64]:
    """The images of a split: drawn, listed in a file, or all."""
    if shares or split is None:
        return drawn_part(len(images), split, shares, seed)
    path = root / f"{split}.txt"
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        advice = "list the split's images there, or give `split_shares`"
        raise DataError(f"{path}: cannot be read as text ({error}); {advice}") from error
    numbers = {name: number for number, name in enumerate(images)}
    numbers |= {Path(name).stem: number for number, name in enumerate(images)}
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip() and line.strip() not in numbers:
            raise DataError(f"{path}: line {number} names {line.strip()!r}, which is not among the images with joints")
        if line.strip():
            found.append(numbers[line.strip()])
    if not found:
        raise DataError(f"{path}: names no images")
    return np.array(found, np.int64)


def _boxes(positions: NDArray[np.float32], margin: float) -> NDArray[np.float32]:
    """A box around the labelled joints of each, [N, 4]; not a number where they have no extent."""
    places = np.where(positions[..., 2:] > 0, positions[..., :2], np.float32(np.nan))
    low, high = np.fmin.reduce(places, axis=1), np.fmax.reduce(places, axis=1)
    longer = (high - low).max(1, keepdims=True)
    boxes = np.concatenate([low - margin * longer, high + margin * longer], axis=1).astype(np.float32)
    boxes[~(boxes[:, 2:] > boxes[:, :2]).all(1)] = np.nan
    return boxes


def _notes(path: Path, images: list[str], rows: NDArray[np.int64], boxes: NDArray[np.float32]) -> list[str]:
    without = rows[np.isnan(boxes[rows, 0])]
    lines = (f"{path}: {images[row]} has no two joints that are labelled and apart, so no person" for row in without)
    return at_most(lines, len(without))
