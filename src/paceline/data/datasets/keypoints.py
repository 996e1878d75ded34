"""Images of one person each, with all keypoints in one npy or JSON file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count, CountOrZero, KeyOf, NonNegative
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import open_regular
from paceline.data.argument_types import ClassNames, KeypointPairs, Name, SplitShares
from paceline.data.batch import KeypointNames, Sample
from paceline.data.io.image import EXTENSIONS, MAX_PIXELS, ImageFiles, packed_names
from paceline.data.keypoint_names import known_joints, mirrored_pairs
from paceline.data.objects import at_most, drawn_part, read_json

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest


@register.dataset("joints", checks=[KeyOf("split", "split_shares")])
class Keypoints:
    """The images root/images/ with the joints of root/joints.npy, a row for each, by name.

    A json file names its images itself. Coordinates are taken as they are, in pixels from the left upper corner. The
    third column is 0 for what is not labeled and 1 for what is, or 0, 1 hidden and 2 visible. A person's box holds
    all labeled joints and a margin, a share of its longer side, and is cut at the image's border. 14 joints are taken
    as those of the Leeds sports pose sets and 17 as COCO's unless `names` calls them otherwise. A split is a list of
    images, root/<split>.txt, or drawn with `split_shares`.
    """

    channels = 3

    def __init__(
        self,
        root: Path,
        joints: Name = "joints.npy",
        images: Name = "images",
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        margin: NonNegative = 0.1,
        names: ClassNames | None = None,
        pairs: KeypointPairs | None = None,
        limbs: KeypointPairs | None = None,
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
    ) -> None:
        root = Path(root)
        self._file = path = root / joints
        folder = root / images
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

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and what the file of joints holds."""
        digest.content(self._file)
        digest.files(self._files.folder, self._files.names(self._rows), "images")

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size, and the joints and box of its person, if any is labeled."""
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
    found: KeypointsFile,
    names: Sequence[str] | None,
    pairs: Sequence[Sequence[int]] | None,
    limbs: Sequence[Sequence[int]] | None,
) -> KeypointNames:
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
    return KeypointNames(
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
        with open_regular(path) as file:
            lines = file.read().decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        advice = "list the split's images there, or give `split_shares`"
        raise DataError(
            f"{path}: cannot be read as text ({getattr(error, 'strerror', None) or error}); {advice}"
        ) from error
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
    """A box around the labeled joints of each, [N, 4]; not a number where they have no extent."""
    places = np.where(positions[..., 2:] > 0, positions[..., :2], np.float32(np.nan))
    low, high = np.fmin.reduce(places, axis=1), np.fmax.reduce(places, axis=1)
    longer = (high - low).max(1, keepdims=True)
    boxes = np.concatenate([low - margin * longer, high + margin * longer], axis=1).astype(np.float32)
    boxes[~(boxes[:, 2:] > boxes[:, :2]).all(1)] = np.nan
    return boxes


def _notes(path: Path, images: list[str], rows: NDArray[np.int64], boxes: NDArray[np.float32]) -> list[str]:
    without = rows[np.isnan(boxes[rows, 0])]
    lines = (f"{path}: {images[row]} has no two joints that are labeled and apart, so no person" for row in without)
    return at_most(lines, len(without))


_EXPECTED = "expected [images, joints, 3] as x, y and visibility, or [images, joints, 2]"


class KeypointsFile(NamedTuple):
    """What a file holds; an npy file has no names of images or joints."""

    positions: NDArray[np.float32]
    """x, y and 0 not labeled, 1 hidden or 2 visible, [N, J, 3]; 0 0 0 where a joint is not labeled."""
    images: list[str] | None
    names: list[str] | None
    pairs: list[tuple[int, int]] | None


def read_joints(path: Path) -> KeypointsFile:
    """The joints in a file; one of another shape is a DataError."""
    if path.suffix == ".npy":
        return KeypointsFile(_labelled(path, _read_npy(path)), None, None, None)
    if path.suffix == ".json":
        return _read_json(path)
    raise DataError(f"{path}: ends in {path.suffix or 'nothing'}, expected .npy or .json")


def _read_npy(path: Path) -> NDArray[Any]:
    try:
        open_regular(path).close()
        # Mapped first, or a wrong header could ask for any amount of memory.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as an array ({getattr(error, 'strerror', None) or error})") from error


def _read_json(path: Path) -> KeypointsFile:
    """{"joints": {image: [[x, y, visibility], ...]}, "joint_names": [...], "flip_pairs": [...]}, or what is inside."""
    content = read_json(path)
    joints = content.get("joints", content) if isinstance(content, dict) else None
    if not isinstance(joints, dict) or not joints:
        raise DataError(f'{path}: expected {{"joints": {{"image.jpg": [[x, y, visibility], ...], ...}}}}')
    images = sorted(joints)
    count = len(joints[images[0]]) if isinstance(joints[images[0]], list) else 0
    for image in images:
        found = _shape(joints[image])
        if found is None or found[0] != count or found[1] not in (2, 3):
            shown = f"[{found[0]}, {found[1]}]" if found else f"{joints[image]!r:.60}"
            raise DataError(
                f"{path}: {image} has joints of shape {shown}, expected [{count}, 3] or [{count}, 2] numbers"
            )
    try:
        values = np.array([joints[image] for image in images], np.float64)
    except ValueError as error:
        raise DataError(
            f"{path}: some images have x, y and visibility, others x and y alone; give all the same"
        ) from error
    names, pairs = (content.get(key) if joints is not content else None for key in ("joint_names", "flip_pairs"))
    if not _is_names(names, count) or not _is_pairs(pairs, count):
        raise DataError(f"{path}: joint_names and flip_pairs are not {count} texts, and pairs of their numbers from 0")
    return KeypointsFile(_labelled(path, values), images, names, pairs and [(pair[0], pair[1]) for pair in pairs])


def _is_names(names: Any, count: int) -> bool:
    return names is None or (
        isinstance(names, list) and len(names) == count and all(isinstance(name, str) for name in names)
    )


def _is_pairs(pairs: Any, count: int) -> bool:
    if pairs is None:
        return True
    shape = _shape(pairs)
    return shape is not None and shape[1] in (0, 2) and all(end in range(count) for pair in pairs for end in pair)


def _shape(rows: Any) -> tuple[int, int] | None:
    """Of rows of numbers that are all of one length, or None."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None
    lengths = {len(row) for row in rows} or {0}
    are_numbers = all(type(value) in (int, float) for row in rows for value in row)
    return (len(rows), lengths.pop()) if len(lengths) == 1 and are_numbers else None


def _labelled(path: Path, values: NDArray[Any]) -> NDArray[np.float32]:
    """The joints with a visibility of 0, 1 or 2, and zeros where they are not labeled."""
    if values.ndim != 3 or values.shape[2] not in (2, 3) or 0 in values.shape or values.dtype.kind not in "iuf":
        shape = " × ".join(map(str, values.shape)) or "one value"
        raise DataError(f"{path}: holds {shape} of {values.dtype}, {_EXPECTED}")
    positions = values[..., :2].astype(np.float32)
    if values.shape[2] == 2:
        visibility = np.where(np.isfinite(positions).all(2), 2, 0)
    else:
        visibility = values[..., 2]
        if not np.isin(visibility, (0, 1, 2)).all():
            wrong = visibility[~np.isin(visibility, (0, 1, 2))][0]
            raise DataError(f"{path}: has {wrong} as a visibility, expected 0 and 1, or 0, 1 and 2")
        if visibility.max() == 1:  # a flag for what is labeled
            visibility = visibility * 2
    is_labelled = visibility[..., None] > 0
    if not np.isfinite(positions[np.broadcast_to(is_labelled, positions.shape)]).all():
        raise DataError(f"{path}: a joint that is labeled lies at a place that is no number")
    positions = np.where(is_labelled, positions, np.float32(0))
    return np.concatenate([positions, visibility[..., None].astype(np.float32)], axis=2)
