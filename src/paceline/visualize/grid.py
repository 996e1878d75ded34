"""Grids of captioned images with a title and a color legend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageDraw

from paceline.core.text import evenly_spaced
from paceline.visualize.colors import BORDER, CENTER, CORRECT, LEFT, RIGHT, TEXT, WRONG, Color, class_colors
from paceline.visualize.image import Image, fit, load_font, text_width, truncate, wrap

_MARGIN, _GAP = 16, 8
_CAPTION_SIZE, _TITLE_SIZE, _LINE_SPACING = 12, 13, 3
_MIN_CELL = 96  # narrower cells have no room for captions
_SWATCH = 13
_BEHIND_CLASSES = 1 << 20
_FRAMES, _FRAME_GAP = 4, 2
_SCREEN = 1.6  # how much wider than high


class LegendEntry(NamedTuple):
    """A color and its meaning, sorted by `order`; without a color the swatch is empty."""

    order: int
    name: str
    color: Color | None


class Panel(NamedTuple):
    """An image in a grid, framed in green for a correct prediction and in red for a wrong one."""

    image: Image
    caption: str = ""
    is_correct: bool | None = None
    legend: tuple[LegendEntry, ...] = ()


KEYPOINT_LEGEND = (
    LegendEntry(_BEHIND_CLASSES + 1, "left", LEFT),
    LegendEntry(_BEHIND_CLASSES + 2, "right", RIGHT),
    LegendEntry(_BEHIND_CLASSES + 3, "neither", CENTER),
)


def class_legend(ids: npt.ArrayLike, classes: Sequence[str]) -> tuple[LegendEntry, ...]:
    """Return the entries of the classes among `ids`, and one for ignored pixels."""
    found, colors = np.unique(np.asarray(ids, np.int64)), class_colors(classes)
    known = [LegendEntry(index, classes[index], colors[index]) for index in found.tolist() if index < len(classes)]
    return (*known, LegendEntry(_BEHIND_CLASSES, "ignored", None)) if len(known) < len(found) else tuple(known)


def image_grid(samples: Sequence[Sequence[Panel]], title: str = "") -> Image:
    """Lay out panels in rows of equal length, so that the page is nearly as wide and high as a screen.

    The panels of one sample stay side by side.
    """
    panels_per_sample = max(map(len, samples))
    cell = max(_MIN_CELL, *(max(panel.image.shape[:2]) for panels in samples for panel in panels))
    height = max(panel.image.shape[0] for panels in samples for panel in panels) + _MARGIN + _GAP + _CAPTION_SIZE
    unit = panels_per_sample * (cell + _MARGIN)
    even = {math.ceil(len(samples) / num_rows) for num_rows in range(1, len(samples) + 1)}
    shapes = {number: number * unit / (math.ceil(len(samples) / number) * height) for number in even}
    per_row = min(even, key=lambda number: abs(math.log(shapes[number] / _SCREEN)))
    width = per_row * unit + _MARGIN
    rows = [
        _draw_row([panel for panels in samples[start : start + per_row] for panel in panels], cell, width)
        for start in range(0, len(samples), per_row)
    ]
    heading = [_draw_title(title, width)] if title else []
    legend = sorted({entry for panels in samples for panel in panels for entry in panel.legend})
    return np.concatenate([*heading, *rows, _draw_legend(legend, width)])


def tile_frames(frames: npt.NDArray[np.uint8], side: int) -> Image:
    """Return four frames of a clip [T, H, W, 3], evenly spaced in time, row by row in one image."""
    chosen = [frames[index] for index in evenly_spaced(len(frames), _FRAMES)]
    columns = math.ceil(math.sqrt(len(chosen)))
    small = [fit(frame, (side - _FRAME_GAP * (columns - 1)) // columns) for frame in chosen]
    height, width = (length + _FRAME_GAP for length in small[0].shape[:2])
    rows = math.ceil(len(small) / columns)
    page = np.full((rows * height - _FRAME_GAP, columns * width - _FRAME_GAP, 3), 255, np.uint8)
    for index, frame in enumerate(small):
        top, left = index // columns * height, index % columns * width
        page[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
    return page


def _draw_row(panels: Sequence[Panel], cell: int, width: int) -> Image:
    font, line_height = load_font(_CAPTION_SIZE), _CAPTION_SIZE + _LINE_SPACING
    captions = [wrap(panel.caption, font, cell) for panel in panels]
    height = max(panel.image.shape[0] for panel in panels)
    page = _blank(width, _MARGIN + height + _GAP + line_height * max(map(len, captions)))
    draw = PIL.ImageDraw.Draw(page)
    for column, (panel, lines) in enumerate(zip(panels, captions, strict=True)):
        center = _MARGIN + column * (cell + _MARGIN) + cell // 2
        _place(page, draw, panel, (center, _MARGIN + height // 2))
        for number, line in enumerate(lines):
            place = (center, _MARGIN + height + _GAP + number * line_height)
            draw.text(place, line, font=font, fill=TEXT, anchor="ma")
    return np.array(page)


def _place(page: PIL.Image.Image, draw: PIL.ImageDraw.ImageDraw, panel: Panel, center: tuple[int, int]) -> None:
    height, width = panel.image.shape[:2]
    left, top = center[0] - width // 2, center[1] - height // 2
    color, border = {True: (CORRECT, 3), False: (WRONG, 3), None: (BORDER, 1)}[panel.is_correct]
    edges = (left - border, top - border, left + width + border - 1, top + height + border - 1)
    draw.rectangle(edges, outline=color, width=border)
    page.paste(PIL.Image.fromarray(panel.image), (left, top))


def _draw_title(title: str, width: int) -> Image:
    page, font = _blank(width, _MARGIN + _TITLE_SIZE + _GAP), load_font(_TITLE_SIZE)
    PIL.ImageDraw.Draw(page).text((_MARGIN, _MARGIN), truncate(title, font, width - 2 * _MARGIN), font=font, fill=TEXT)
    return np.array(page)


def _draw_legend(entries: Iterable[LegendEntry], width: int) -> Image:
    """Draw swatches with names, wrapped into lines, and the bottom margin."""
    font, line_height = load_font(_CAPTION_SIZE), _SWATCH + _GAP
    places, x, line = [], _MARGIN, 0
    for entry in entries:
        name = truncate(entry.name, font, width // 2)
        length = _SWATCH + 6 + text_width([name], font) + _MARGIN
        if x > _MARGIN and x + length > width:
            x, line = _MARGIN, line + 1
        places.append((x, _MARGIN + line * line_height, name, entry.color))
        x += length
    page = _blank(width, _MARGIN + (line + 1) * line_height + _GAP if places else _MARGIN)
    draw = PIL.ImageDraw.Draw(page)
    for x, y, name, color in places:
        draw.rectangle((x, y, x + _SWATCH, y + _SWATCH), fill=color, outline=color or TEXT)
        draw.text((x + _SWATCH + 6, y + _SWATCH / 2), name, font=font, fill=TEXT, anchor="lm")
    return np.array(page)


def _blank(width: int, height: int) -> PIL.Image.Image:
    return PIL.Image.new("RGB", (width, height), "white")
