"""Joints of one person an image, as an npy or a json file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.objects import read_json

_EXPECTED = "expected [images, joints, 3] as x, y and visibility, or [images, joints, 2]"


class JointsFile(NamedTuple):
    """What a file holds; an npy file has no names of images or joints."""

    positions: NDArray[np.float32]
    """x, y and 0 not labelled, 1 hidden or 2 visible, [N, J, 3]; 0 0 0 where a joint is not labelled."""
    images: list[str] | None
    names: list[str] | None
    pairs: list[tuple[int, int]] | None


def read_joints(path: Path) -> JointsFile:
    """The joints in a file; one of another shape is a DataError."""
    if path.suffix == ".npy":
        return JointsFile(_labelled(path, _read_npy(path)), None, None, None)
    if path.suffix == ".json":
        return _read_json(path)
    raise DataError(f"{path}: ends in {path.suffix or 'nothing'}, expected .npy or .json")


def _read_npy(path: Path) -> NDArray[Any]:
    try:
        # Mapped first, or a wrong header could ask for any amount of memory.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as an array ({error})") from error


def _read_json(path: Path) -> JointsFile:
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
    return JointsFile(_labelled(path, values), images, names, pairs and [(pair[0], pair[1]) for pair in pairs])


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
    """The joints with a visibility of 0, 1 or 2, and zeros where they are not labelled."""
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
        if visibility.max() == 1:  # a flag for what is labelled
            visibility = visibility * 2
    is_labelled = visibility[..., None] > 0
    if not np.isfinite(positions[np.broadcast_to(is_labelled, positions.shape)]).all():
        raise DataError(f"{path}: a joint that is labelled lies at a place that is no number")
    positions = np.where(is_labelled, positions, np.float32(0))
    return np.concatenate([positions, visibility[..., None].astype(np.float32)], axis=2)
