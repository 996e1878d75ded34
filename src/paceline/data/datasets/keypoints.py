"""Images of one person each, with all keypoints in one npy or JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from paceline.core.arguments import CountOrZero, KeyOf, NonNegative
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import open_regular
from paceline.data.argument_types import ClassNames, KeypointPairs, Name, SplitShares
from paceline.data.batch import KeypointNames, Sample
from paceline.data.datasets.detection import DetectionDataset, at_most, list_names, read_json, read_names, write_objects
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.index.list_file import encode_name
from paceline.data.io.image import EXTENSIONS

_LSP = [
    *("right_ankle", "right_knee", "right_hip", "left_hip", "left_knee", "left_ankle", "right_wrist", "right_elbow"),
    *("right_shoulder", "left_shoulder", "left_elbow", "left_wrist", "neck", "head_top"),
]
_LSP_SKELETON = [
    *((0, 1), (1, 2), (3, 4), (4, 5), (2, 3)),
    *((6, 7), (7, 8), (9, 10), (10, 11)),
    *((2, 8), (3, 9), (8, 12), (9, 12), (12, 13)),
]
_COCO = [
    *("nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow"),
    *("right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee"),
    *("left_ankle", "right_ankle"),
]
_COCO_SKELETON = [
    *((15, 13), (13, 11), (16, 14), (14, 12), (11, 12)),
    *((5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10)),
    *((1, 2), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6)),
]
_KNOWN = {14: (_LSP, _LSP_SKELETON), 17: (_COCO, _COCO_SKELETON)}


def known_keypoints(count: int) -> KeypointNames | None:
    """The keypoints of the Leeds sports pose sets, of which there are 14, or of COCO's persons, which have 17."""
    if count not in _KNOWN:
        return None
    names, skeleton = _KNOWN[count]
    return KeypointNames(list(names), find_flip_pairs(names), list(skeleton))


def find_flip_pairs(names: Sequence[str]) -> list[tuple[int, int]]:
    """The keypoints that differ in left and right alone, such as left_hip and right_hip, as pairs of numbers."""
    numbers = {name.lower(): number for number, name in enumerate(names)}
    found = []
    for name, number in numbers.items():
        other = numbers.get(name.replace("left", "right")) if "left" in name else None
        if other is not None:
            found.append((min(number, other), max(number, other)))
    return sorted(found)


@register.dataset("keypoints", checks=[KeyOf("split", "split_shares")])
class Keypoints(DetectionDataset):
    """The images root/`images` with the keypoints of root/`file`, a row for each, by name.

    A JSON file names its images itself. Coordinates are taken as they are, in pixels from the left upper corner. The
    third column is 0 for what is not labeled and 1 for what is, or 0, 1 hidden and 2 visible. A person's box holds
    all labeled keypoints and a margin, a share of its longer side, and is cut at the image's border. 14 keypoints are
    taken as those of the Leeds sports pose sets and 17 as COCO's unless `names` calls them otherwise. A split is a
    list of images, root/<split>.txt, or drawn with `split_shares`.
    """

    def __init__(
        self,
        root: Path,
        file: Name = "joints.npy",
        images: Name = "images",
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        margin: NonNegative = 0.1,
        names: ClassNames | None = None,
        flip_pairs: KeypointPairs | None = None,
        skeleton: KeypointPairs | None = None,
        follow_links: bool = False,
    ) -> None:
        root, path = Path(root), Path(root, file)
        list_name = None if split_shares else split

        def build(builder: IndexBuilder) -> None:
            found = _read(path, builder)
            builder.facts["keypoint_names"] = _named(path, found, names, flip_pairs, skeleton)
            image_names = found.images or _image_names(path, root / images, len(found.positions), builder)
            rows = (
                np.arange(len(image_names)) if list_name is None else _split_rows(root, list_name, image_names, builder)
            )
            _write(builder, path, found.positions[rows], [image_names[row] for row in rows], margin)

        arguments: dict[str, Any] = {"file": file, "images": images, "split": list_name, "margin": margin}
        arguments |= {"names": [names, flip_pairs, skeleton]}
        index = open_index(root, "keypoints", arguments, build)
        inside = None if follow_links else root
        super().__init__(index, root / images, inside, path, split, split_shares, split_seed)
        self.joints = KeypointNames.from_json(index.facts["keypoint_names"])

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size, and the keypoints and box of its person, if any is labeled."""
        sample = super().open(index)
        height, width = sample["size"].tolist()
        boxes = np.clip(sample["boxes"], 0, np.array([width, height, width, height], np.float32))
        sides = boxes[:, 2:] - boxes[:, :2]
        if (sides <= 0).any():
            raise DataError(
                f"{self.path(index)}: all of its keypoints lie outside the image, which is {width}×{height}"
            )
        keypoints = self._index["keypoints"][self._span(int(self._part[index]))].copy()
        return {**sample, "boxes": boxes, "area": sides[:, 0] * sides[:, 1], "keypoints": keypoints}


def _write(
    builder: IndexBuilder, path: Path, positions: NDArray[np.float32], images: Sequence[str], margin: float
) -> None:
    """Write the images and a person for each that has an extent."""
    places = np.where(positions[..., 2:] > 0, positions[..., :2], np.float32(np.nan))
    low, high = np.fmin.reduce(places, axis=1), np.fmax.reduce(places, axis=1)
    longer = (high - low).max(1, keepdims=True)
    boxes = np.concatenate([low - margin * longer, high + margin * longer], axis=1).astype(np.float32)
    has_extent = (boxes[:, 2:] > boxes[:, :2]).all(1)
    rows, without = np.flatnonzero(has_extent), np.flatnonzero(~has_extent)
    lines = (
        f"{path}: {images[row]} has no two keypoints that are labeled and apart, so no person"
        for row in without.tolist()
    )
    builder.facts["notes"] += at_most(lines, len(without))
    builder.facts["classes"] = ["person"]
    builder.append_texts("file", [encode_name(path, 0, name) for name in images])
    builder.append("keypoints", positions[rows])
    write_objects(builder, len(images), rows, boxes[rows], np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_))


def _named(
    path: Path,
    found: _KeypointsFile,
    names: Sequence[str] | None,
    flip_pairs: Sequence[Sequence[int]] | None,
    skeleton: Sequence[Sequence[int]] | None,
) -> tuple[list[str], Any, Any]:
    """The keypoints as the recipe calls them, or else the file, or else as they are known by their number."""
    count = found.positions.shape[1]
    known = known_keypoints(count)
    called = list(names or found.names or (known.names if known else ()))
    if len(called) != count:
        given = f"`names` has {len(called)}" if names else "their names are not known: give them as `names`"
        raise DataError(f"{path}: has {count} keypoints, but {given}")
    pairs = flip_pairs if flip_pairs is not None else None if names else found.flip_pairs
    for key, links in (("flip_pairs", pairs), ("skeleton", skeleton)):
        wrong = [pair for pair in links or () if not all(0 <= end < count for end in pair)]
        if wrong:
            raise DataError(f"{path}: has {count} keypoints, numbered from 0, but `{key}` has {list(wrong[0])}")
    if skeleton is None:
        skeleton = known.limbs if known is not None and called == known.names else ()
    return called, find_flip_pairs(called) if pairs is None else pairs, skeleton


def _image_names(path: Path, folder: Path, count: int, builder: IndexBuilder) -> list[str]:
    """The images in a folder, sorted, of which there must be one for each row."""
    names = [name for name in list_names(folder, builder, "the images") if name.lower().endswith(EXTENSIONS)]
    if len(names) != count:
        raise DataError(f"{path}: has keypoints for {count:,} images, but {folder} has {len(names):,} images")
    return names


def _split_rows(root: Path, split: str, images: list[str], builder: IndexBuilder) -> NDArray[np.int64]:
    """The images that the list of a split names, with or without their extensions."""
    path = root / f"{split}.txt"
    numbers = {Path(name).stem: number for number, name in enumerate(images)}
    numbers |= {name: number for number, name in enumerate(images)}
    names = read_names(path, numbers, builder, "list the split's images there, or give `split_shares`")
    return np.array([numbers[name] for name in names], np.int64)


_Keypoint = Annotated[list[Annotated[float, Field(strict=True)]], Field(min_length=2, max_length=3)]


class _KeypointsFile(NamedTuple):
    """What a file holds; an npy file has no names of images or keypoints."""

    positions: NDArray[np.float32]
    """x, y and 0 not labeled, 1 hidden or 2 visible, [N, J, 3]; 0 0 0 where a keypoint is not labeled."""
    images: list[str] | None = None
    names: list[str] | None = None
    flip_pairs: list[list[int]] | None = None


def _read(path: Path, builder: IndexBuilder) -> _KeypointsFile:
    """The keypoints in a file; one of another shape is a DataError."""
    if path.suffix not in (".npy", ".json"):
        raise DataError(f"{path}: its extension is {path.suffix or 'none'}, expected .npy or .json")
    if not path.exists():
        raise DataError(f"{path}: no such file")
    builder.watch(path)
    return _KeypointsFile(_labeled(path, _read_npy(path))) if path.suffix == ".npy" else _read_json(path)


def _read_npy(path: Path) -> NDArray[Any]:
    try:
        open_regular(path).close()
        # Mapped first, or a wrong header could ask for any amount of memory.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as an array ({getattr(error, 'strerror', None) or error})") from error


@dataclass
class _JsonFile:
    joints: Annotated[dict[Any, Annotated[list[_Keypoint], Field(min_length=1)]], Field(min_length=1)]
    joint_names: list[str] | None = None
    flip_pairs: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None = None


def _read_json(path: Path) -> _KeypointsFile:
    """{"joints": {image: [[x, y, visibility], ...]}, "joint_names": [...], "flip_pairs": [...]}, or what is inside."""
    content = read_json(path)
    try:
        is_whole = isinstance(content, dict) and "joints" in content
        found = TypeAdapter(_JsonFile).validate_python(content if is_whole else {"joints": content})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = " ".join(map(str, first["loc"]))
        expected = 'expected {"joints": {"image.jpg": [[x, y, visibility], ...], ...}}'
        raise DataError(f"{path}: {place} is {first['input']!r:.60}: {first['msg']}; {expected}") from error
    images = sorted(found.joints)
    lengths = {image: [len(row) for row in found.joints[image]] for image in images}
    count, columns = len(lengths[images[0]]), lengths[images[0]][0]
    wrong = next((image for image in images if lengths[image] != [columns] * count), None)
    if wrong is not None:
        expected = "expected the same number of [x, y, visibility] or [x, y] for every image"
        raise DataError(f"{path}: {wrong} has keypoints {found.joints[wrong]!r:.60}; {expected}")
    values = np.array([found.joints[image] for image in images], np.float64)
    return _KeypointsFile(_labeled(path, values), images, found.joint_names, found.flip_pairs)


def _labeled(path: Path, values: NDArray[Any]) -> NDArray[np.float32]:
    """The keypoints with a visibility of 0, 1 or 2, and zeros where they are not labeled."""
    if values.ndim != 3 or values.shape[2] not in (2, 3) or 0 in values.shape or values.dtype.kind not in "iuf":
        shape = " × ".join(map(str, values.shape)) or "one value"
        expected = "expected [images, keypoints, 3] as x, y and visibility, or [images, keypoints, 2]"
        raise DataError(f"{path}: holds {shape} of {values.dtype}, {expected}")
    positions = values[..., :2].astype(np.float32)
    visibility = values[..., 2] if values.shape[2] == 3 else np.where(np.isfinite(positions).all(2), 2, 0)
    if not np.isin(visibility, (0, 1, 2)).all():
        wrong = visibility[~np.isin(visibility, (0, 1, 2))][0]
        raise DataError(f"{path}: has {wrong} as a visibility, expected 0 and 1, or 0, 1 and 2")
    if visibility.max() == 1:  # a flag for what is labeled
        visibility = visibility * 2
    is_labeled = visibility[..., None] > 0
    if not np.isfinite(positions[np.broadcast_to(is_labeled, positions.shape)]).all():
        raise DataError(f"{path}: a keypoint that is labeled lies at a place that is no number")
    positions = np.where(is_labeled, positions, np.float32(0))
    return np.concatenate([positions, visibility[..., None].astype(np.float32)], axis=2)
