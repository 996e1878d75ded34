"""Small data sets that nobody had to photograph: shapes on textured ground, in the files that real data sets have."""

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

from paceline.core.errors import UsageError
from paceline.core.extras import missing_extra
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
Random = np.random.Generator
Pixels = NDArray[np.uint8]
Plane = NDArray[np.float32]


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


def write_classification(folder: Path, number: int, seed: int) -> None:
    """Photos of a disc, a square or a triangle each, in a folder per class: disc/, square/, triangle/."""
    side = 64
    for index in range(number):
        random, label = np.random.default_rng([seed, index]), 1 + index % len(_SIDES)
        distance = _drawn_shape(random, _SIDES[SHAPES[label]], side, side).distance(side, side)
        cover = _texture(random, side, side, 0.7, _hue(random, label))
        path = folder / SHAPES[label] / f"image_{index:04d}.jpg"
        path.parent.mkdir(exist_ok=True)
        image = lay_over(paint_ground(random, side, side), cover, distance)
        Image.fromarray(to_pixels(image)).save(path, quality=92)


def write_saliency(folder: Path, number: int, seed: int) -> None:
    """Photos with one to three vivid shapes, and masks that are white there: images/, masks/, train.txt, val.txt."""

    def paint(random: Random) -> tuple[Pixels, Image.Image]:
        height, width = random.integers(96, 160, 2).tolist()
        image, inside = paint_ground(random, height, width), np.zeros((height, width), np.bool_)
        for _ in range(random.integers(1, 4)):
            shape = _drawn_shape(random, random.choice([0, 3, 4, 5, 6]).item(), height, width)
            distance = shape.distance(height, width)
            image = lay_over(image, _texture(random, height, width, vivid=1.0), distance)
            inside |= distance < 0
        return to_pixels(image), Image.fromarray(inside.astype(np.uint8) * 255)

    _write_pairs(folder, number, seed, paint)


def write_segmentation(folder: Path, number: int, seed: int) -> None:
    """Photos of discs, squares and triangles, and masks of `SHAPES` by number with `IGNORED` borders; files alike.

    Each shape has a third of all hues.
    """
    palette = [value for color in class_colors(SHAPES) for value in color] + [255] * 3 * (256 - len(SHAPES))

    def paint(random: Random) -> tuple[Pixels, Image.Image]:
        height, width = 96, 128
        image, ids = paint_ground(random, height, width), np.zeros((height, width), np.uint8)
        for _ in range(random.integers(2, 5)):
            label = int(random.integers(1, len(SHAPES)))
            shape = _drawn_shape(random, _SIDES[SHAPES[label]], height, width)
            distance = shape.distance(height, width)
            image = lay_over(image, _texture(random, height, width, 0.7, _hue(random, label)), distance)
            ids[distance < 1] = IGNORED
            ids[distance < -1] = label
        mask = Image.fromarray(ids)
        mask.putpalette(palette)
        return to_pixels(image), mask

    _write_pairs(folder, number, seed, paint)


def write_detection(folder: Path, number: int, seed: int) -> None:
    """Photos of discs, squares and triangles, and their boxes as COCO has them: images/, train.json, val.json."""
    (folder / "images").mkdir()
    images, annotations = [], []
    for index in range(number):
        image, shapes = _paint_shapes(np.random.default_rng([seed, index]))
        height, width = image.shape[:2]
        name = f"image_{index:04d}.jpg"
        Image.fromarray(image).save(folder / "images" / name, quality=92)
        images.append({"id": index, "file_name": name, "height": height, "width": width})
        annotations.append([_coco_object(index, label, box) for label, box in shapes])
    categories = [{"id": number, "name": name} for number, name in enumerate(SHAPES[1:], start=1)]
    num_train = count_train(number)
    for split, which in {"train": range(num_train), "val": range(num_train, number)}.items():
        objects = [each for index in which for each in annotations[index]]
        numbered = [{**each, "id": place} for place, each in enumerate(objects, start=1)]
        content = {"images": images[which.start : which.stop], "annotations": numbered, "categories": categories}
        (folder / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")


def _paint_shapes(random: Random) -> tuple[Pixels, list[tuple[int, list[float]]]]:
    """Shapes that do not hide each other, with the number of each one's class and its box as x1 y1 x2 y2."""
    height, width = 128, 160
    image, shapes, hidden = paint_ground(random, height, width), [], np.zeros((height, width), np.bool_)
    for _ in range(random.integers(1, 5)):
        label = int(random.integers(1, len(SHAPES)))
        distance = _drawn_shape(random, _SIDES[SHAPES[label]], height, width).distance(height, width)
        inside = distance < 0
        if (inside & hidden).any():
            continue
        hidden |= distance < 3
        image = lay_over(image, _texture(random, height, width, 0.7, _hue(random, label)), distance)
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        shapes.append((label, [float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)]))
    return to_pixels(image), shapes


def _coco_object(image: int, label: int, box: Sequence[float]) -> dict[str, Any]:
    left, top, right, bottom = box
    extent = [left, top, right - left, bottom - top]
    return {"image_id": image, "category_id": label, "bbox": extent, "area": extent[2] * extent[3], "iscrowd": 0}


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


def _write_pairs(folder: Path, number: int, seed: int, paint: Callable[[Random], tuple[Pixels, Image.Image]]) -> None:
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for index in range(number):
        image, mask = paint(np.random.default_rng([seed, index]))
        Image.fromarray(image).save(folder / f"images/image_{index:04d}.jpg", quality=92)
        mask.save(folder / f"masks/image_{index:04d}.png")
    _write_lists(folder, ".txt", [f"image_{index:04d}\n" for index in range(number)])


def _write_lists(folder: Path, extension: str, lines: Sequence[str]) -> None:
    """Three quarters to learn from; samples differ by chance alone, so any will do."""
    num_train = count_train(len(lines))
    (folder / f"train{extension}").write_text("".join(lines[:num_train]), encoding="utf-8")
    (folder / f"val{extension}").write_text("".join(lines[num_train:]), encoding="utf-8")


def count_train(number: int) -> int:
    """How many of so many samples are to learn from."""
    return number - max(1, number // 4)


def _film(random: Random, motion: str) -> list[Pixels]:
    height, width = _VIDEO
    ground, cover = paint_ground(random, height, width), _texture(random, height, width, vivid=1.0)
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
        frames.append(to_pixels(lay_over(ground, cover, shape.distance(height, width))))
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


def _drawn_shape(random: Random, sides: int, height: int, width: int) -> Shape:
    radius = random.uniform(0.14, 0.28) * min(height, width)
    x, y = random.uniform(radius, width - radius), random.uniform(radius, height - radius)
    return Shape(sides, x, y, radius, random.uniform(0, 2 * math.pi))


def _hue(random: Random, label: int) -> float:
    """A hue of a class, whose outlines alone would take long to learn."""
    return 2 * math.pi / len(_SIDES) * label + random.uniform(-0.5, 0.5)


def paint_ground(random: Random, height: int, width: int) -> Plane:
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


def lay_over(image: Plane, cover: Plane | Sequence[int], distance: Plane) -> Plane:
    """The cover where the distance is below 0, with a soft edge."""
    share = np.clip(0.5 - distance, 0, 1)[..., None]
    return np.asarray(image * (1 - share) + np.asarray(cover, np.float32) * share, np.float32)


def to_pixels(image: Plane) -> Pixels:
    """The image in whole numbers."""
    return np.clip(image.round(), 0, 255).astype(np.uint8)
