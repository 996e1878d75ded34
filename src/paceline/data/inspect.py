"""Every sample of a data set decoded once and counted, and a contact sheet of samples as training sees them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.threads import map_in_order
from paceline.data.batch import IMAGE_SIZE, Batch, KeypointNames, Sample, as_arrays
from paceline.data.loader_profile import transformed_batches
from paceline.data.skip_list import UNREADABLE, Skipped, as_skipped, locate_error
from paceline.data.split_loader import Dataset, SplitLoader, decode_image
from paceline.data.transforms.batch import Normalize
from paceline.visualize.colors import class_colors
from paceline.visualize.grid import KEYPOINT_LEGEND, LegendEntry, Panel, class_legend, image_grid, tile_frames
from paceline.visualize.image import Image, fit, to_rgb
from paceline.visualize.overlay import draw_boxes, draw_keypoints, draw_label_map, draw_mask

Counts = NDArray[np.int64]

_BAND = 1 << 24  # pixels up to which counts in float32, which OpenCV gives, are exact
_FRAME_BYTES = 1 << 27  # of a video that are decoded at a time
_AHEAD = 16  # samples a thread that may wait for being counted


class Look(NamedTuple):
    """What one sample holds; `counts` are added over samples, by name."""

    height: int
    width: int
    frames: int | None
    objects: int | None
    counts: dict[str, Counts]
    digest: bytes = b""
    """Of the decoded image, by which exact duplicates are found."""


@dataclass
class Findings:
    """What the samples looked at so far hold."""

    examined: int = 0
    bad: list[Skipped] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Samples by height and width."""
    frames: Counter[int] = field(default_factory=Counter)
    """Videos by their number of frames."""
    objects: Counter[int] = field(default_factory=Counter)
    """Samples by their number of objects."""
    counts: dict[str, Counts] = field(default_factory=dict)
    """"values" [C, 256]: pixels by channel and value; "label" and "classes" [num_classes]; "crowd" [1]; "mask" [256]:
    pixels by value; "keypoints" [J, 3]: not labeled, hidden, visible."""
    digests: dict[bytes, list[int]] = field(default_factory=dict)
    """Samples by the digest of their image."""

    def add(self, index: int, seen: Look | Skipped) -> None:
        """Count one more sample."""
        self.examined += 1
        if isinstance(seen, Skipped):
            self.bad.append(seen)
            return
        if seen.digest:
            self.digests.setdefault(seen.digest, []).append(index)
        self.sizes[seen.height, seen.width] += 1
        if seen.frames is not None:
            self.frames[seen.frames] += 1
        if seen.objects is not None:
            self.objects[seen.objects] += 1
        for name, counts in seen.counts.items():
            self.counts[name] = self.counts[name] + counts if name in self.counts else counts

    def moments(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel over all pixels, of values from 0 to 1.

        They come from whole numbers, so that they are exact but for the last rounding. Images of floats have none.
        """
        means, deviations = [], []
        for row in self.counts["values"].tolist() if "values" in self.counts else ():
            number, total = sum(row), sum(value * count for value, count in enumerate(row))
            squares = sum(value * value * count for value, count in enumerate(row))
            means.append(total / (255 * number))
            deviations.append(math.sqrt((number * squares - total * total) / (255 * number) ** 2))
        return means, deviations


def examine(
    dataset: Dataset,
    indices: Sequence[int],
    findings: Findings,
    threads: int,
    report: Callable[[int], None],
) -> None:
    """Decode the samples and add what they hold to `findings`, which is true at any moment, also if this is stopped.

    `report` is given how many more are done.
    """
    looks = map_in_order(partial(_try, dataset), indices, threads, _AHEAD * threads)
    for index, seen in zip(indices, looks, strict=True):
        findings.add(index, seen)
        report(1)


def _try(dataset: Dataset, index: int) -> Look | Skipped:
    try:
        sample = getattr(dataset, "open", dataset.read)(index)
        try:
            return look(dataset, as_arrays(sample))
        except DataError as error:
            raise locate_error(dataset, index, error) from error
    except UNREADABLE as error:
        return as_skipped(dataset, index, error)


def look(dataset: Dataset, sample: Sample) -> Look:
    """What a sample holds; something in it that does not fit together is a DataError."""
    counts = _annotations(sample, len(getattr(dataset, "classes", ())))
    objects = len(sample["classes"]) if "classes" in sample else None
    image = sample["image"]
    if hasattr(image, "num_frames"):  # a video that is not decoded
        counts["values"], whole = np.zeros((), np.int64), blake2b(digest_size=16)
        for part in _all_frames(image):
            counts["values"] = counts["values"] + _values(dataset, part)
            whole.update(part.data)
        return Look(image.height, image.width, image.num_frames, objects, counts, whole.digest())
    pixels = decode_image(sample)["image"]
    height, width = pixels.shape[-3:-1]
    if "mask" in sample and sample["mask"].shape != (height, width):
        found = f"the mask is {sample['mask'].shape[1]}×{sample['mask'].shape[0]} pixels"
        raise DataError(f"{found}, but its image {width}×{height}")
    if pixels.dtype == np.uint8:
        counts["values"] = _values(dataset, pixels)
    frames = pixels.shape[-4] if pixels.ndim > 3 else None
    digest = blake2b(np.ascontiguousarray(pixels).data, digest_size=16, key=str(pixels.shape).encode()).digest()
    whole_height, whole_width = map(int, sample.get("size", (height, width)))  # it may have been decoded smaller
    return Look(whole_height, whole_width, frames, objects, counts, digest)


def _all_frames(video: Any) -> Iterator[NDArray[np.uint8]]:
    length = max(1, _FRAME_BYTES // (3 * video.height * video.width))
    for start in range(0, video.num_frames, length):
        yield video.frames(range(start, min(video.num_frames, start + length)))


def _annotations(sample: Sample, num_classes: int) -> dict[str, Counts]:
    counts: dict[str, Counts] = {}
    if "label" in sample and num_classes:
        label = sample["label"]
        counts["label"] = (
            _by_class([label], num_classes, "the label") if isinstance(label, int) else _positive(label, num_classes)
        )
    if "classes" in sample and num_classes:
        counts["classes"] = _by_class(sample["classes"], num_classes, "the class of an object")
    if "crowd" in sample:
        counts["crowd"] = np.array([np.count_nonzero(sample["crowd"])])
    if "mask" in sample and sample["mask"].dtype.kind != "f":  # floats are values such as depth, not ids
        counts["mask"] = _histogram(sample["mask"].reshape(-1, 1))[0]
    if "keypoints" in sample:
        seen = sample["keypoints"][..., 2]
        counts["keypoints"] = np.stack([(seen == value).sum(0) for value in range(3)], 1).astype(np.int64)
    return counts


def _by_class(numbers: Any, num_classes: int, what: str) -> Counts:
    numbers = np.asarray(numbers, np.int64)
    wrong = numbers[(numbers < 0) | (numbers >= num_classes)]
    if len(wrong):
        raise DataError(f"{what} is {wrong[0]}, but there are {num_classes} classes, counted from 0")
    return np.bincount(numbers, minlength=num_classes)


def _positive(label: NDArray[Any], num_classes: int) -> Counts:
    if label.shape != (num_classes,):
        raise DataError(f"the label has the shape {list(label.shape)}, but there are {num_classes} classes")
    return (label > 0).astype(np.int64)


def _values(dataset: Dataset, pixels: NDArray[np.uint8]) -> Counts:
    """How often each channel has each value, [C, 256]."""
    channels = pixels.shape[-1]
    if channels != getattr(dataset, "channels", channels):
        raise DataError(f"the image has {channels} channels, but the data set {dataset.channels}")
    return _histogram(pixels.reshape(-1, channels))


def _histogram(rows: NDArray[np.uint8]) -> Counts:
    """How often each column [P, C] has each value, [C, 256]."""
    counts = np.zeros((rows.shape[1], 256), np.int64)
    for start in range(0, len(rows), _BAND):
        band = rows[start : start + _BAND, None]
        for column in range(len(counts)):
            found = cv2.calcHist([band], [column], None, [256], [0, 256])
            counts[column] += np.asarray(found).ravel().astype(np.int64)
    return counts


CELL = 240


@dataclass
class ContactSheet:
    """Samples of any number of splits, drawn."""

    panels: list[Panel] = field(default_factory=list)

    def add(self, source: SplitLoader, split: str, ids: Sequence[int]) -> str | None:
        """Draw samples of a split as its transforms make them in the first epoch, normalization undone.

        Returns what keeps them from being a batch, if anything does; then each is made on its own.
        """
        samples, problem = load_augmented(source, ids)
        classes, joints = list(source.dataset.classes), getattr(source.dataset, "joints", None)
        for index, sample in samples:
            label = _label(sample, classes)
            caption = f"{split} {index}: {label}" if label else f"{split} {index}"
            image = draw_sample(sample, CELL, classes, joints)
            self.panels.append(Panel(image, caption, legend=_legend(sample, classes)))
        return problem

    def draw(self, title: str) -> Image:
        """Return the whole sheet as an image."""
        return image_grid([[panel] for panel in self.panels], title)


def draw_sample(sample: Sample, side: int, classes: Sequence[str], joints: KeypointNames | None = None) -> Image:
    """Draw masks, boxes and keypoints over a sample's image, whose longer side becomes `side` pixels.

    With a single class, a mask holds shades from 0 to 255. Of a clip, four frames are drawn.
    """
    pixels = to_rgb(sample["image"])
    if pixels.ndim > 3:
        return tile_frames(pixels.reshape(-1, *pixels.shape[-3:]), side)
    image, ids = fit(pixels, side), sample.get("classes", np.zeros(len(sample.get("boxes", ())), np.int64))
    colors = class_colors(classes, max(ids, default=0) + 1)
    scale = np.array([image.shape[1] / pixels.shape[1], image.shape[0] / pixels.shape[0]])
    if "mask" in sample and len(classes) > 1:
        image = draw_label_map(image, sample["mask"], colors[: len(classes)])
    elif "mask" in sample:
        image = draw_mask(image, sample["mask"] / 255, colors[0])
    for mask, index in zip(sample.get("masks", ()), ids, strict=False):
        image = draw_mask(image, mask, colors[index])
    if "boxes" in sample:
        widths = [1 if is_crowd else 2 for is_crowd in sample.get("crowd", [False] * len(ids))]
        image = draw_boxes(image, sample["boxes"] * np.tile(scale, 2), [colors[index] for index in ids], widths)
    if "keypoints" in sample:
        keypoints = sample["keypoints"] * np.array([*scale, 1])
        image = draw_keypoints(image, keypoints, *((joints.names, joints.limbs) if joints else ()))
    return image


def load_augmented(source: SplitLoader, ids: Sequence[int]) -> tuple[list[tuple[int, Sample]], str | None]:
    """Return samples by id after the transforms of the first epoch, images uint8, and why they cannot be a batch."""
    problems: list[str] = []
    samples = []
    for batch in transformed_batches(source, ids, len(ids), problems):
        images = _denormalize(source, batch["image"])
        samples += [(number, _take(batch, images, place)) for place, number in enumerate(batch.ids.tolist())]
    return samples, problems[-1] if problems else None


def _denormalize(source: SplitLoader, images: Tensor) -> NDArray[np.uint8]:
    """Return the pixels, 0 to 255 and channels last, of images as a model gets them."""
    images = images.movedim(2 if images.ndim == 6 else 1, -1)  # several clips stand before their channels
    for transform in reversed(source.batch_transforms):
        if isinstance(transform, Normalize):
            images = images * torch.tensor(transform.std) + torch.tensor(transform.mean)
    return images.mul(255).round().clamp(0, 255).to(torch.uint8).contiguous().numpy()


def _take(batch: Batch, images: NDArray[np.uint8], place: int) -> Sample:
    fields = {name: value[place] for name, value in batch.items() if name not in ("id", "image", IMAGE_SIZE)}
    arrays: dict[str, Any] = {
        name: value.numpy() if isinstance(value, Tensor) else value for name, value in fields.items()
    }
    if IMAGE_SIZE not in batch:
        return {**arrays, "image": images[place]}
    height, width = batch[IMAGE_SIZE][place].tolist()
    cropped = {name: array[:height, :width] for name, array in arrays.items() if name == "mask"}
    return {**arrays, **cropped, "image": images[place, :height, :width]}


def _label(sample: Sample, classes: Sequence[str]) -> str:
    if "label" not in sample:
        return ""
    label = np.asarray(sample["label"])
    if not label.ndim:
        return classes[int(label)] if int(label) < len(classes) else str(int(label))
    named = sorted(((float(share), classes[number]) for number, share in enumerate(label) if share > 0), reverse=True)
    if all(share == 1 for share, _ in named):
        return ", ".join(name for _, name in named) or "none"
    return ", ".join(f"{name} {share:.2f}" for share, name in named)


def _legend(sample: Sample, classes: Sequence[str]) -> tuple[LegendEntry, ...]:
    """Return what the colors that were drawn stand for."""
    ids = np.ravel(sample.get("classes", ()))
    if "mask" in sample:
        ids = np.append(ids, sample["mask"] if len(classes) > 1 else range(len(classes)))
    return class_legend(ids, classes) + (KEYPOINT_LEGEND if "keypoints" in sample else ())
