"""Confusion matrices as images.

Drawn with Pillow in 15 to 50 ms: matplotlib needs 0.2 to 1.2 s, and training waits for it at every evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageDraw

from paceline.visualize.colors import BORDER, TEXT
from paceline.visualize.image import Font, Image, load_font, text_width, to_ascii, truncate

_MARGIN, _GAP = 16, 8
_TITLE_SIZE, _LABEL_SIZE, _SMALL_SIZE = 17, 13, 10
_COLOR_MAP = np.array([[255, 255, 255], [189, 215, 238], [66, 134, 198], [8, 48, 107]], dtype=np.float64)
_MAX_COUNTED = 30  # classes whose counts are written: more would be too small to read
_MAX_NAMED = 100
_NAME_WIDTH = 130


def draw_confusion_matrix(matrix: npt.ArrayLike, classes: Sequence[str], title: str) -> Image:
    """Draw true classes down and predicted ones across, colored by the fraction of the row.

    Counts are written into the cells of up to 30 classes, names beside those of up to 100.
    """
    cells, cell_size = _draw_cells(np.asarray(matrix))
    font = load_font(_LABEL_SIZE if cell_size >= 20 else _SMALL_SIZE)
    names = [truncate(name, font, _NAME_WIDTH) for name in classes] if len(classes) <= _MAX_NAMED else []
    longest = text_width(names, font)
    left, top = 2 * _MARGIN + _LABEL_SIZE + longest, 2 * _MARGIN + _TITLE_SIZE + _GAP
    right, bottom = left + cells.width, top + cells.height
    below = longest if longest > cell_size - 6 else _LABEL_SIZE + 5
    title = to_ascii(title)
    width = max(right + _MARGIN, text_width([title], load_font(_TITLE_SIZE)) + 2 * _MARGIN)
    page = PIL.Image.new("RGB", (width, bottom + below + 3 * _GAP + _LABEL_SIZE + _MARGIN), "white")
    draw = PIL.ImageDraw.Draw(page)
    draw.text((_MARGIN, _MARGIN), title, font=load_font(_TITLE_SIZE), fill=TEXT)
    page.paste(cells, (left, top))
    draw.rectangle((left - 1, top - 1, right, bottom), outline=BORDER)
    for index, name in enumerate(names):
        center = (index + 0.5) * cell_size
        draw.text((left - _GAP, top + center), name, font=font, fill=TEXT, anchor="rm")
        if longest > cell_size - 6:
            _draw_vertical(page, name, font, (left + center, bottom + _GAP))
        else:
            draw.text((left + center, bottom + _GAP), name, font=font, fill=TEXT, anchor="ma")
    label_font, label_width = load_font(_LABEL_SIZE), text_width(["true"], load_font(_LABEL_SIZE))
    draw.text(((left + right) / 2, bottom + below + 2 * _GAP), "predicted", font=label_font, fill=TEXT, anchor="ma")
    _draw_vertical(page, "true", label_font, (_MARGIN + _LABEL_SIZE / 2, (top + bottom - label_width) / 2))
    return np.array(page)


def _draw_cells(counts: npt.NDArray[Any]) -> tuple[PIL.Image.Image, float]:
    """Return the cells with their counts, and the width of a cell in pixels."""
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    cell_size = _choose_cell_size(len(counts))
    side = max(1, round(len(counts) * cell_size))
    method = PIL.Image.Resampling.NEAREST if cell_size >= 1 else PIL.Image.Resampling.BOX
    cells = PIL.Image.fromarray(_colorize(fractions)).resize((side, side), method)
    if len(counts) > _MAX_COUNTED:
        return cells, cell_size
    room = round(cell_size) - 6
    texts = {place: _format_count(int(count), room) for place, count in np.ndenumerate(counts) if count}
    sizes = (size for size in (13, 12, 11) if text_width(list(texts.values()), load_font(size)) <= room)
    font, draw = load_font(next(sizes, _SMALL_SIZE)), PIL.ImageDraw.Draw(cells)
    for (row, column), text in texts.items():
        center = ((column + 0.5) * cell_size, (row + 0.5) * cell_size)
        draw.text(center, text, font=font, fill="white" if fractions[row, column] > 0.4 else TEXT, anchor="mm")
    return cells, cell_size


def _choose_cell_size(num_classes: int) -> float:
    if num_classes <= _MAX_COUNTED:
        return min(72, max(32, 480 // num_classes))
    if num_classes <= _MAX_NAMED:
        return 13
    return max(1000 // num_classes, min(1, 1000 / num_classes))


def _colorize(fractions: npt.NDArray[np.float64]) -> Image:
    """Map 0 to white and 1 to dark blue, steeply near 0 so that rare mistakes are visible."""
    position, stops = fractions**0.6 * (len(_COLOR_MAP) - 1), range(len(_COLOR_MAP))
    channels = [np.interp(position, stops, channel) for channel in _COLOR_MAP.T]
    return np.stack(channels, -1).round().astype(np.uint8)


def _format_count(count: int, room: int) -> str:
    if text_width([str(count)], load_font(_SMALL_SIZE)) <= room:
        return str(count)
    return f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def _draw_vertical(page: PIL.Image.Image, text: str, font: Font, top_center: tuple[float, float]) -> None:
    """Write text that reads from bottom to top."""
    label = PIL.Image.new("RGB", (text_width([text], font) + 1, 2 * round(font.getbbox("Mg")[3] / 2) + 1), "white")
    PIL.ImageDraw.Draw(label).text((0, label.height / 2), text, font=font, fill=TEXT, anchor="lm")
    label = label.transpose(PIL.Image.Transpose.ROTATE_90)
    page.paste(label, (round(top_center[0] - label.width / 2), round(top_center[1])))
