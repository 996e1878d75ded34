"""Small data sets that nobody had to photograph: shapes and stick people, in the files that real data sets have."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import UsageError, missing_extra
from paceline.data.datasets.keypoints import known_keypoints
from paceline.visualize.colors import class_colors

IGNORED = 255
"""In masks of classes, the border of a shape."""
SHAPES = ("background", "disc", "square", "triangle")
"""The classes of pixels."""
MOTIONS = ("circling", "growing", "sideways", "vertical")
"""The classes of videos."""

_SIDES = {"disc": 0, "square": 4, "triangle": 3}
_VIDEO = (80, 112)  # height and width
_FRAMES_A_SECOND = 25
_PHOTO = (96, 160)  # of stick people
_NUM_KEYPOINTS = 14  # those of the Leeds sports pose sets
_COLORS, _CENTER = {"left": (200, 60, 160), "right": (235, 215, 60)}, (120, 220, 90)
_HIDDEN, _UNLABELED = 0.1, 0.05  # shares of the keypoints
Random = np.random.Generator
Pixels = NDArray[np.uint8]
Plane = NDArray[np.float32]
Points = NDArray[np.float64]


class Shape(NamedTuple):
    """A disc, or a polygon of equal sides, around a place, in pixels."""

    sides: int
    x: float
    y: float
    radius: float
    turn: float

    def distance(self, height: int, width: int) -> Plane:
        """How far each pixel lies outside, below 0 inside, [H, W]."""
        down, across = np.mgrid[:height, :width].astype(np.float32) + np.float32(0.5)
        across, down = across - self.x, down - self.y
        if self.sides == 0:
            return np.asarray(np.hypot(across, down) - self.radius, np.float32)
        angles = [self.turn + 2 * math.pi * side / self.sides for side in range(self.sides)]
        planes = [across * math.cos(angle) + down * math.sin(angle) for angle in angles]
        return np.asarray(np.max(planes, 0) - self.radius * math.cos(math.pi / self.sides), np.float32)

    def outline(self) -> list[float]:
        """The corners as x and y in turn; of a disc, points on its edge."""
        number = self.sides or 48
        angles = [self.turn + math.pi * (2 * corner + 1) / number for corner in range(number)]
        points = [(self.x + self.radius * math.cos(angle), self.y + self.radius * math.sin(angle)) for angle in angles]
        return [round(value, 2) for point in points for value in point]


# --- one data set for each task -----------------------------------------------------------------------------


def write_classification(folder: Path, number: int, seed: int) -> None:
    """Photos of a disc, a square or a triangle each, in a folder per class: disc/, square/, triangle/."""
    side = 64
    for index in range(number):
        random, label = np.random.default_rng([seed, index]), 1 + index % len(_SIDES)
        distance = _drawn_shape(random, _SIDES[SHAPES[label]], side, side).distance(side, side)
        cover = _class_texture(random, label, side, side)
        _save(folder / SHAPES[label], index, _lay_over(_ground(random, side, side), cover, distance))


def write_saliency(folder: Path, number: int, seed: int) -> None:
    """Photos with one to three vivid shapes, and masks that are white there: images/, masks/, train.txt, val.txt."""

    def paint(random: Random) -> tuple[Plane, Image.Image]:
        height, width = random.integers(96, 160, 2).tolist()
        image, inside = _ground(random, height, width), np.zeros((height, width), np.bool_)
        for _ in range(random.integers(1, 4)):
            shape = _drawn_shape(random, random.choice([0, 3, 4, 5, 6]).item(), height, width)
            distance = shape.distance(height, width)
            image = _lay_over(image, _texture(random, height, width, vivid=1.0), distance)
            inside |= distance < 0
        return image, Image.fromarray(inside.astype(np.uint8) * 255)

    _write_pairs(folder, number, seed, paint)


def write_segmentation(folder: Path, number: int, seed: int) -> None:
    """Photos of discs, squares and triangles, and masks of `SHAPES` by number with `IGNORED` borders; files alike.

    Each shape has a third of all hues.
    """
    palette = [value for color in class_colors(SHAPES) for value in color] + [255] * 3 * (256 - len(SHAPES))

    def paint(random: Random) -> tuple[Plane, Image.Image]:
        height, width = 96, 128
        image, ids = _ground(random, height, width), np.zeros((height, width), np.uint8)
        for _ in range(random.integers(2, 5)):
            label = int(random.integers(1, len(SHAPES)))
            distance = _drawn_shape(random, _SIDES[SHAPES[label]], height, width).distance(height, width)
            image = _lay_over(image, _class_texture(random, label, height, width), distance)
            ids[distance < 1] = IGNORED
            ids[distance < -1] = label
        mask = Image.fromarray(ids)
        mask.putpalette(palette)
        return image, mask

    _write_pairs(folder, number, seed, paint)


def write_detection(folder: Path, number: int, seed: int) -> None:
    """Photos of discs, squares and triangles that do not hide each other, and their boxes as COCO has them."""
    _write_coco(folder, number, seed, _paint_objects, _categories())


def write_instance_segmentation(folder: Path, number: int, seed: int) -> None:
    """The photos of `write_detection`; the objects have outlines too, as polygons."""

    def paint(random: Random) -> tuple[Plane, list[dict[str, Any]]]:
        return _paint_objects(random, with_outlines=True)

    _write_coco(folder, number, seed, paint, _categories())


def _categories() -> list[dict[str, Any]]:
    return [{"id": number, "name": name} for number, name in enumerate(SHAPES[1:], start=1)]


def _paint_objects(random: Random, with_outlines: bool = False) -> tuple[Plane, list[dict[str, Any]]]:
    height, width = 128, 160
    image, objects, hidden = _ground(random, height, width), [], np.zeros((height, width), np.bool_)
    for _ in range(random.integers(1, 5)):
        label = int(random.integers(1, len(SHAPES)))
        shape = _drawn_shape(random, _SIDES[SHAPES[label]], height, width)
        distance = shape.distance(height, width)
        inside = distance < 0
        if (inside & hidden).any():
            continue
        hidden |= distance < 3
        image = _lay_over(image, _class_texture(random, label, height, width), distance)
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        box = [float(columns[0]), float(rows[0]), float(np.ptp(columns) + 1), float(np.ptp(rows) + 1)]
        each: dict[str, Any] = {"category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
        outlined = {"segmentation": [shape.outline()], "area": float(inside.sum())} if with_outlines else {}
        objects.append(each | outlined)
    return image, objects


def write_keypoints(folder: Path, number: int, seed: int) -> None:
    """Photos of one or two stick people, and their keypoints as COCO has them."""
    names, skeleton = _body()

    def paint(random: Random) -> tuple[Plane, list[dict[str, Any]]]:
        height, width = _PHOTO
        image, people = _ground(random, height, width), []
        for place in [width / 4, 3 * width / 4][: random.integers(1, 3)]:
            points = _pose(random)
            low, high = points.min(0), points.max(0)
            scale = random.uniform(0.75, 0.95) * min(height, width / 2) / (high - low).max()
            points = (points - (low + high) / 2) * scale + [place, height / 2]
            image = _draw_person(image, points, scale)
            people.append(points)
        return image, [_person(points, random) for points in people]

    joined = [[start + 1, end + 1] for start, end in skeleton]
    category = {"id": 1, "name": "person", "keypoints": names, "skeleton": joined}
    _write_coco(folder, number, seed, paint, [category])


def write_video(folder: Path, number: int, seed: int) -> None:
    """Videos of a shape that moves as one of `MOTIONS`: videos/MOTION/, and lists train.csv and val.csv."""
    lines = []
    for index in range(number):
        random = np.random.default_rng([seed, index])
        motion = MOTIONS[index % len(MOTIONS)]
        name = f"videos/{motion}/clip_{index:04d}.mp4"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _encode(folder / name, _film(random, motion))
        lines.append(f"{name},{motion}\n")
    _write_lists(folder, ".csv", lines)


# --- files --------------------------------------------------------------------------------------------------


def _write_pairs(folder: Path, number: int, seed: int, paint: Callable[[Random], tuple[Plane, Image.Image]]) -> None:
    """Images and masks."""
    (folder / "masks").mkdir()
    for index in range(number):
        image, mask = paint(np.random.default_rng([seed, index]))
        _save(folder / "images", index, image)
        mask.save(folder / f"masks/image_{index:04d}.png")
    _write_lists(folder, ".txt", [f"image_{index:04d}\n" for index in range(number)])


def _write_coco(
    folder: Path,
    number: int,
    seed: int,
    paint: Callable[[Random], tuple[Plane, list[dict[str, Any]]]],
    categories: Sequence[dict[str, Any]],
) -> None:
    """Images and their annotations: images/, train.json, val.json."""
    images, annotations = [], []
    for index in range(number):
        image, objects = paint(np.random.default_rng([seed, index]))
        height, width = image.shape[:2]
        name = _save(folder / "images", index, image)
        images.append({"id": index, "file_name": name, "height": height, "width": width})
        annotations.append([{"image_id": index, **each} for each in objects])
    num_train = _count_train(number)
    for split, which in {"train": slice(num_train), "val": slice(num_train, number)}.items():
        objects = [each for of_image in annotations[which] for each in of_image]
        numbered = [{**each, "id": place} for place, each in enumerate(objects, start=1)]
        content = {"images": images[which], "annotations": numbered, "categories": categories}
        (folder / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")


def _write_lists(folder: Path, extension: str, lines: Sequence[str]) -> None:
    num_train = _count_train(len(lines))
    (folder / f"train{extension}").write_text("".join(lines[:num_train]), encoding="utf-8")
    (folder / f"val{extension}").write_text("".join(lines[num_train:]), encoding="utf-8")


def _count_train(number: int) -> int:
    """Three quarters to learn from; samples differ by chance alone, so any will do."""
    return number - max(1, number // 4)


def _save(folder: Path, index: int, image: Plane) -> str:
    folder.mkdir(exist_ok=True)
    name = f"image_{index:04d}.jpg"
    Image.fromarray(_to_pixels(image)).save(folder / name, quality=92)
    return name


def _to_pixels(image: Plane) -> Pixels:
    return np.clip(image.round(), 0, 255).astype(np.uint8)


def _film(random: Random, motion: str) -> list[Pixels]:
    height, width = _VIDEO
    ground, cover = _ground(random, height, width), _texture(random, height, width, vivid=1.0)
    sides, radius, turn = random.choice([0, 3, 4]).item(), random.uniform(8, 13), random.uniform(0, 2 * math.pi)
    num_frames, phase, speed = int(random.integers(24, 41)), random.uniform(0, 1), random.uniform(0.8, 1.6)
    middle = width / 2 + random.uniform(-5, 5), height / 2 + random.uniform(-5, 5)
    frames = []
    for frame in range(num_frames):
        angle = 2 * math.pi * (phase + speed * frame / num_frames)
        wave = math.sin(angle)
        along, across, growth = {
            "circling": (24 * math.cos(angle), 24 * wave, 1.0),
            "growing": (0.0, 0.0, 1.6 + wave),
            "sideways": (40 * wave, 0.0, 1.0),
            "vertical": (0.0, 26 * wave, 1.0),
        }[motion]
        shape = Shape(sides, middle[0] + along, middle[1] + across, radius * growth, turn)
        frames.append(_to_pixels(_lay_over(ground, cover, shape.distance(height, width))))
    return frames


def _encode(path: Path, frames: Sequence[Pixels]) -> None:
    if missing := missing_extra("video"):
        raise UsageError(f"videos: {missing}")
    import av

    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as container:
        # With one thread and no versions written down, the same frames give the same bytes; with the encoder's tree of
        # macroblocks they do not always.
        options = {"crf": "20", "preset": "fast", "x264-params": "mbtree=0"}
        stream: Any = container.add_stream("libx264", rate=_FRAMES_A_SECOND, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


# --- shapes -------------------------------------------------------------------------------------------------


def _drawn_shape(random: Random, sides: int, height: int, width: int) -> Shape:
    radius = random.uniform(0.14, 0.28) * min(height, width)
    x, y = random.uniform(radius, width - radius), random.uniform(radius, height - radius)
    return Shape(sides, x, y, radius, random.uniform(0, 2 * math.pi))


def _class_texture(random: Random, label: int, height: int, width: int) -> Plane:
    """The texture of a class, which has a third of all hues: outlines alone would take long to learn."""
    hue = 2 * math.pi / len(_SIDES) * label + random.uniform(-0.5, 0.5)
    return _texture(random, height, width, 0.7, hue)


def _ground(random: Random, height: int, width: int) -> Plane:
    """What shapes are drawn on: dull patches, [H, W, 3]."""
    return _texture(random, height, width, vivid=0.15)


def _texture(random: Random, height: int, width: int, vivid: float, hue: float | None = None) -> Plane:
    """Two colors in patches, and grain; colors are gray where vivid is 0, pure where 1: [H, W, 3], 0 to 255."""
    colors = _colors(random, vivid, random.uniform(0, 2 * math.pi) if hue is None else hue)
    cells = random.uniform(0, 1, random.integers(4, 12, 2)).astype(np.float32)
    patches = cv2.resize(cells, (width, height), interpolation=cv2.INTER_LINEAR)[..., None]
    grain = random.normal(0, 8, (height, width, 1)).astype(np.float32)
    return np.asarray(colors[0] * patches + colors[1] * (1 - patches) + grain, np.float32)


def _colors(random: Random, vivid: float, hue: float) -> Plane:
    """Two colors of different brightness whose hues are near the one given, so that no mixture of them is gray."""
    hues = hue + random.uniform(-0.5, 0.5, (2, 1))
    brightness = random.uniform(60, 195, (2, 1))
    pure = np.cos(hues + 2 * math.pi / 3 * np.arange(3))  # [2, 3], red, green and blue, which add up to 0
    return np.asarray(np.clip(brightness + 110 * vivid * pure, 0, 255), np.float32)


def _lay_over(image: Plane, cover: Plane | Sequence[int], distance: Plane) -> Plane:
    """The cover where the distance is below 0, with a soft edge."""
    share = np.clip(0.5 - distance, 0, 1)[..., None]
    return np.asarray(image * (1 - share) + np.asarray(cover, np.float32) * share, np.float32)


# --- stick people -------------------------------------------------------------------------------------------


def _body() -> tuple[list[str], list[tuple[int, int]]]:
    """The names of the keypoints, and which of them are joined."""
    known = known_keypoints(_NUM_KEYPOINTS)
    assert known is not None
    return known.names, known.limbs


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


def _draw_person(image: Plane, points: Points, scale: float) -> Plane:
    """The image with a person: left and right limbs have their colors."""
    names, skeleton = _body()
    for start, end in skeleton:
        sides = {names[each].partition("_")[0] for each in (start, end)} & _COLORS.keys()
        color = _COLORS[sides.pop()] if len(sides) == 1 else _CENTER
        image = _lay_over(image, color, _distance(points[start], points[end]) - np.float32(0.07 * scale))
    middle = (points[12] + points[13]) / 2
    return _lay_over(image, _CENTER, _distance(middle, middle) - np.float32(0.28 * scale))


def _distance(start: Points, end: Points) -> Plane:
    """How far the center of each pixel lies from a line between two places, [H, W]."""
    height, width = _PHOTO
    centers = np.stack(np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5), -1)
    along = end - start
    share = np.clip((centers - start) @ along / max(float(along @ along), 1e-9), 0, 1)
    return np.asarray(np.linalg.norm(centers - start - share[..., None] * along, axis=-1), np.float32)


def _person(points: Points, random: Random) -> dict[str, Any]:
    """An annotation; a few keypoints are hidden, and a few not labeled."""
    drawn = random.random(_NUM_KEYPOINTS)
    seen = np.where(drawn < _UNLABELED, 0, np.where(drawn < _UNLABELED + _HIDDEN, 1, 2))
    keypoints: list[float] = []
    for (x, y), visibility in zip((points - 0.5).round(2).tolist(), seen.tolist(), strict=True):  # numbers of pixels
        keypoints += [x, y, visibility] if visibility else [0, 0, 0]
    low, high = np.clip(points.min(0) - 4, 0, None), np.minimum(points.max(0) + 4, _PHOTO[::-1])
    box = [*low.round(2).tolist(), *(high - low).round(2).tolist()]
    return {
        "category_id": 1, "iscrowd": 0, "bbox": box, "area": round(box[2] * box[3], 2),
        "keypoints": keypoints, "num_keypoints": int((seen > 0).sum()),
    }  # fmt: skip
