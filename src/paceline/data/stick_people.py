"""A small data set of stick people with the keypoints of the Leeds sports pose sets, in COCO's format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.data.datasets.keypoints import known_keypoints
from paceline.data.synthetic import Pixels, Plane, Random, count_train, lay_over, paint_ground, to_pixels

_HEIGHT, _WIDTH = 96, 160
_NUM_KEYPOINTS = 14
_COLORS, _CENTER = {"left": (200, 60, 160), "right": (235, 215, 60)}, (120, 220, 90)
_HIDDEN, _UNLABELED = 0.1, 0.05  # shares of the keypoints
Points = NDArray[np.float64]


def write_keypoints(folder: Path, number: int, seed: int) -> None:
    """Photos of one or two stick people, and their keypoints as COCO has them: images/, train.json, val.json."""
    (folder / "images").mkdir()
    images, people = [], []
    for index in range(number):
        random = np.random.default_rng([seed, index])
        image, keypoints = _paint(random)
        name = f"image_{index:04d}.jpg"
        Image.fromarray(image).save(folder / "images" / name, quality=92)
        images.append({"id": index, "file_name": name, "height": _HEIGHT, "width": _WIDTH})
        people.append([_person(index, points, random) for points in keypoints])
    known = known_keypoints(_NUM_KEYPOINTS)
    assert known is not None
    skeleton = [[start + 1, end + 1] for start, end in known.limbs]
    category = {"id": 1, "name": "person", "keypoints": known.names, "skeleton": skeleton}
    learned = count_train(number)
    for split, which in {"train": range(learned), "val": range(learned, number)}.items():
        flat = [each for index in which for each in people[index]]
        numbered = [{**each, "id": place} for place, each in enumerate(flat, start=1)]
        content = {"images": images[which.start : which.stop], "annotations": numbered, "categories": [category]}
        (folder / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")


def _paint(random: Random) -> tuple[Pixels, list[Points]]:
    """An image, and the keypoints [14, 2] of each person, each in a place of its own."""
    image = paint_ground(random, _HEIGHT, _WIDTH)
    places = [_WIDTH / 4, 3 * _WIDTH / 4][: random.integers(1, 3)]
    keypoints = []
    for place in places:
        points = _pose(random)
        low, high = points.min(0), points.max(0)
        scale = random.uniform(0.75, 0.95) * min(_HEIGHT, _WIDTH / 2) / (high - low).max()
        points = (points - (low + high) / 2) * scale + [place, _HEIGHT / 2]
        image = _draw(image, points, scale)
        keypoints.append(points)
    return to_pixels(image), keypoints


def _pose(random: Random) -> Points:
    """The keypoints of a person who is about 4 tall, facing the viewer: the left is on the right."""

    def limb(start: Points, angle: float, bend: float, length: float) -> tuple[Points, Points]:
        """The joint in the middle and the end of an arm or a leg; angles are from straight down, in radians."""
        middle = start + length * np.array([math.sin(angle), math.cos(angle)])
        return middle, middle + length * np.array([math.sin(angle + bend), math.cos(angle + bend)])

    points = np.zeros((_NUM_KEYPOINTS, 2))
    for side, (hip, knee, ankle, shoulder, elbow, wrist) in {
        -1: (2, 1, 0, 8, 7, 6),
        1: (3, 4, 5, 9, 10, 11),
    }.items():
        points[hip], points[shoulder] = (0.25 * side, 0.65), (0.4 * side, -0.65)
        points[knee], points[ankle] = limb(points[hip], side * random.uniform(0, 0.9), random.uniform(-0.7, 0.7), 0.75)
        arm = side * random.uniform(0.2, 2.8)
        points[elbow], points[wrist] = limb(points[shoulder], arm, side * random.uniform(-0.9, 0.9), 0.6)
    points[12], points[13] = (0, -0.75), (random.uniform(-0.15, 0.15), -1.35)
    turn = random.uniform(-0.5, 0.5)
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    return np.asarray(points @ rotation.T)


def _draw(image: Plane, points: Points, scale: float) -> Plane:
    """The image with a person: left and right limbs have their colors."""
    known = known_keypoints(_NUM_KEYPOINTS)
    assert known is not None
    for start, end in known.limbs:
        sides = {known.names[each].partition("_")[0] for each in (start, end)} & _COLORS.keys()
        color = _COLORS[sides.pop()] if len(sides) == 1 else _CENTER
        image = lay_over(image, color, _distance(points[start], points[end]) - np.float32(0.07 * scale))
    middle = (points[12] + points[13]) / 2
    return lay_over(image, _CENTER, _distance(middle, middle) - np.float32(0.28 * scale))


def _distance(start: Points, end: Points) -> Plane:
    """How far the center of each pixel lies from a line between two places, [H, W]."""
    centers = np.stack(np.meshgrid(np.arange(_WIDTH) + 0.5, np.arange(_HEIGHT) + 0.5), -1)
    along = end - start
    share = np.clip((centers - start) @ along / max(float(along @ along), 1e-9), 0, 1)
    return np.asarray(np.linalg.norm(centers - start - share[..., None] * along, axis=-1), np.float32)


def _person(image: int, points: Points, random: Random) -> dict[str, Any]:
    """An annotation; a few keypoints are hidden, and a few not labeled."""
    drawn = random.random(_NUM_KEYPOINTS)
    seen = np.where(drawn < _UNLABELED, 0, np.where(drawn < _UNLABELED + _HIDDEN, 1, 2))
    keypoints: list[float] = []
    for (x, y), visibility in zip((points - 0.5).round(2).tolist(), seen.tolist(), strict=True):  # numbers of pixels
        keypoints += [x, y, visibility] if visibility else [0, 0, 0]
    low, high = np.clip(points.min(0) - 4, 0, None), np.minimum(points.max(0) + 4, [_WIDTH, _HEIGHT])
    box = [*low.round(2).tolist(), *(high - low).round(2).tolist()]
    return {
        "image_id": image, "category_id": 1, "iscrowd": 0, "bbox": box, "area": round(box[2] * box[3], 2),
        "keypoints": keypoints, "num_keypoints": int((seen > 0).sum()),
    }  # fmt: skip
