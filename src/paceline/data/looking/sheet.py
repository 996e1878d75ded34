"""A contact sheet: samples as training gets to see them, with what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.lettering import cut, font_of_size
from paceline.core.palette import Colour, colours_of
from paceline.core.picture import Picture, image_grid
from paceline.data.batch import Batch, Sample
from paceline.data.loading.source import Source
from paceline.data.looking.drawing import LEFT, MIDDLE, RIGHT, draw_sample
from paceline.data.skipping import UNREADABLE
from paceline.data.transforms.batch_transforms import Normalize

CELL, COLUMNS = 240, 5
_MARGIN, _LINE, _TEXT, _SWATCH = 16, 22, 13, 14
_CPU = torch.device("cpu")


class Shown(NamedTuple):
    """A picture of a sample and the words below it."""

    picture: Picture
    caption: str


@dataclass
class Sheet:
    """Samples of any number of splits, and the colours that were used."""

    shown: list[Shown] = field(default_factory=list)
    legend: dict[str, Colour] = field(default_factory=dict)

    def add(self, source: Source, split: str, ids: Sequence[int]) -> str | None:
        """Draw samples of a split as its transforms make them in the first epoch, normalisation undone.

        What keeps them from being a batch, if anything does, is returned; then each is made on its own.
        """
        samples, problem = augmented(source, ids)
        classes, joints = list(source.dataset.classes), getattr(source.dataset, "joints", None)
        for index, sample in samples:
            picture = draw_sample(sample, CELL, classes, joints)
            label = _label(sample, classes)
            self.shown.append(Shown(picture, f"{split} {index}: {label}" if label else f"{split} {index}"))
            self.legend |= _colours(sample, classes)
        self.legend = {
            name: self.legend[name] for name in dict.fromkeys([*classes, *self.legend]) if name in self.legend
        }
        return problem

    def picture(self, title: str) -> Picture:
        """The whole sheet: a title, the samples in rows, and what the colours mean."""
        pictures, captions = [each.picture for each in self.shown], [each.caption for each in self.shown]
        grid = image_grid(pictures, captions, [None] * len(pictures), COLUMNS, CELL)
        return np.concatenate([_heading(title, grid.shape[1]), grid, _legend(self.legend, grid.shape[1])])


def augmented(source: Source, ids: Sequence[int]) -> tuple[list[tuple[int, Sample]], str | None]:
    """Samples with their numbers after all transforms of the first epoch, images uint8, and what kept them apart."""
    try:
        return _made(source, ids), None
    except UNREADABLE as error:
        problem = str(error)
    made = []
    for index in ids:
        try:
            made += _made(source, [index])
        except UNREADABLE as error:
            problem = str(error)
    return made, problem


def _made(source: Source, ids: Sequence[int]) -> list[tuple[int, Sample]]:
    fetched = source.fetch(0, np.array(ids, np.int64))
    if fetched.is_stand_in:
        raise DataError("; ".join(map(str, fetched.skipped)))
    batch = source.finish(fetched, 0, _CPU)
    images = _seen(source, batch["image"])
    return [(int(number), _one(batch, images, place)) for place, number in enumerate(batch.ids.tolist())]


def _seen(source: Source, images: Tensor) -> NDArray[np.uint8]:
    """Pixels of 0 to 255, channels last, of images as a model gets them."""
    images = images.movedim(2 if images.ndim == 6 else 1, -1)  # several clips stand before their channels
    for transform in reversed(source.batch_transforms):
        if isinstance(transform, Normalize):
            images = images * torch.tensor(transform.std) + torch.tensor(transform.mean)
    return images.mul(255).round().clamp(0, 255).to(torch.uint8).contiguous().numpy()


def _one(batch: Batch, images: NDArray[np.uint8], place: int) -> Sample:
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


def _colours(sample: Sample, classes: Sequence[str]) -> dict[str, Colour]:
    """What the colours that were drawn stand for."""
    numbers: set[int] = set()
    if "mask" in sample:
        numbers |= {0} if len(classes) <= 1 else set(np.unique(sample["mask"]).tolist())
    numbers |= set(np.asarray(sample.get("classes", ()), np.int64).tolist())
    colours = colours_of(classes)
    named = {classes[number]: colours[number] for number in sorted(numbers) if number < len(classes)}
    sides = {"left": LEFT, "right": RIGHT, "neither": MIDDLE} if "keypoints" in sample else {}
    return named | sides


def _heading(title: str, width: int) -> Picture:
    from PIL import Image, ImageDraw

    page = Image.new("RGB", (width, _MARGIN + _LINE), "white")
    font = font_of_size(_TEXT)
    ImageDraw.Draw(page).text((_MARGIN, _MARGIN), cut(title, font, width - 2 * _MARGIN), font=font, fill="black")
    return np.array(page)


def _legend(colours: dict[str, Colour], width: int) -> Picture:
    """Swatches with names, in as many lines as they take."""
    from PIL import Image, ImageDraw

    font, places = font_of_size(_TEXT), []
    x, line = _MARGIN, 0
    for name, colour in colours.items():
        text = cut(name, font, width // 2)
        room = _SWATCH + 6 + round(font.getlength(text)) + _MARGIN
        if x > _MARGIN and x + room > width:
            x, line = _MARGIN, line + 1
        places.append((x, line * _LINE, text, colour))
        x += room
    page = Image.new("RGB", (width, (line + 1) * _LINE + _MARGIN if places else 0), "white")
    draw = ImageDraw.Draw(page)
    for x, y, text, colour in places:
        draw.rectangle((x, y, x + _SWATCH, y + _SWATCH), fill=colour)
        draw.text((x + _SWATCH + 6, y), text, font=font, fill="black")
    return np.array(page).reshape(page.height, width, 3)
