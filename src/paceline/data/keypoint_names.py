"""The names of joints in the orders that are in use, their left and right counterparts, and the limbs between them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.batch import KeypointNames

_LSP = [
    "right_ankle",
    "right_knee",
    "right_hip",
    "left_hip",
    "left_knee",
    "left_ankle",
    "right_wrist",
    "right_elbow",
    "right_shoulder",
    "left_shoulder",
    "left_elbow",
    "left_wrist",
    "neck",
    "head_top",
]
_LSP_LIMBS = [
    *((0, 1), (1, 2), (3, 4), (4, 5), (2, 3)),
    *((6, 7), (7, 8), (9, 10), (10, 11)),
    *((2, 8), (3, 9), (8, 12), (9, 12), (12, 13)),
]
_COCO = [
    "nose",
    "left_eye",
    "right_eye",
    "left_ear",
    "right_ear",
    "left_shoulder",
    "right_shoulder",
    "left_elbow",
    "right_elbow",
    "left_wrist",
    "right_wrist",
    "left_hip",
    "right_hip",
    "left_knee",
    "right_knee",
    "left_ankle",
    "right_ankle",
]
_COCO_LIMBS = [
    *((15, 13), (13, 11), (16, 14), (14, 12), (11, 12)),
    *((5, 11), (6, 12), (5, 6), (5, 7), (6, 8), (7, 9), (8, 10)),
    *((1, 2), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6)),
]
_KNOWN = {len(names): (names, limbs) for names, limbs in ((_LSP, _LSP_LIMBS), (_COCO, _COCO_LIMBS))}


def known_joints(count: int) -> KeypointNames | None:
    """The joints of the Leeds sports pose sets, of which there are 14, or of COCO's persons, which have 17."""
    if count not in _KNOWN:
        return None
    names, limbs = _KNOWN[count]
    return KeypointNames(list(names), mirrored_pairs(names), list(limbs))


def mirrored_pairs(names: Sequence[str]) -> list[tuple[int, int]]:
    """The joints that differ in left and right alone, such as left_hip and right_hip, as pairs of numbers."""
    numbers = {name.lower(): number for number, name in enumerate(names)}
    found = []
    for name, number in numbers.items():
        other = numbers.get(name.replace("left", "right")) if "left" in name else None
        if other is not None:
            found.append((min(number, other), max(number, other)))
    return sorted(found)
