"""A contact sheet: samples as training gets to see them, with their annotations drawn over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import Batch, KeypointNames, Sample
from paceline.data.skip_list import UNREADABLE
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize
from paceline.visualize.colors import class_colors
from paceline.visualize.grid import KEYPOINT_LEGEND, LegendEntry, Panel, class_legend, image_grid, tile_frames
from paceline.visualize.image import Image, fit, to_rgb
from paceline.visualize.overlay import draw_boxes, draw_keypoints, draw_label_map, draw_mask

CELL = 240
_MAX_WIDTH = 1296  # five cells
_CPU = torch.device("cpu")


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
        return image_grid([[panel] for panel in self.panels], title, _MAX_WIDTH)


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
    try:
        return _load(source, ids), None
    except UNREADABLE as error:
        problem = str(error)
    loaded = []
    for index in ids:
        try:
            loaded += _load(source, [index])
        except UNREADABLE as error:
            problem = str(error)
    return loaded, problem


def _load(source: SplitLoader, ids: Sequence[int]) -> list[tuple[int, Sample]]:
    fetched = source.fetch(0, np.array(ids, np.int64))
    if fetched.is_placeholder:
        raise DataError("; ".join(map(str, fetched.skipped)))
    batch = source.finish(fetched, 0, _CPU)
    images = _denormalize(source, batch["image"])
    return [(int(number), _take(batch, images, place)) for place, number in enumerate(batch.ids.tolist())]


def _denormalize(source: SplitLoader, images: Tensor) -> NDArray[np.uint8]:
    """Return the pixels, 0 to 255 and channels last, of images as a model gets them."""
    images = images.movedim(2 if images.ndim == 6 else 1, -1)  # several clips stand before their channels
    for transform in reversed(source.batch_transforms):
        if isinstance(transform, Normalize):
            images = images * torch.tensor(transform.std) + torch.tensor(transform.mean)
    return images.mul(255).round().clamp(0, 255).to(torch.uint8).contiguous().numpy()


def _take(batch: Batch, images: NDArray[np.uint8], place: int) -> Sample:
    fields: dict[str, Any] = {name: value[place] for name, value in batch.items() if name not in ("id", "image")}
    arrays = {name: value.numpy() if isinstance(value, Tensor) else value for name, value in fields.items()}
    return {**arrays, "image": images[place]}


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
