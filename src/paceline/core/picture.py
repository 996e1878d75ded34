"""Pictures for people: a grid of captioned images, a confusion matrix, and PNG files.

Pillow is imported when the first one is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.core.lettering import cut, font_of_size, longest, wrap

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage
    from PIL.ImageDraw import ImageDraw

    from paceline.core.lettering import Font

Picture = npt.NDArray[np.uint8]
"""An image as uint8 [H, W, 3]."""
Shares = npt.NDArray[np.float64]

_MARGIN = 16
_GAP = 8
_INK = (33, 37, 41)
_LINE = (206, 212, 218)
_FRAMES = {"good": (47, 158, 68), "bad": (224, 49, 49), None: _LINE}
_COLOURS = np.array([[255, 255, 255], [189, 215, 238], [66, 134, 198], [8, 48, 107]], dtype=np.float64)
_MOST_COUNTED = 30  # classes whose counts are written: more would be too small to read
_MOST_NAMED = 100  # classes whose names are written
_TITLE_SIZE, _AXIS_SIZE, _CAPTION_SIZE = 17, 13, 12


def image_grid(
    images: Sequence[Picture],
    captions: Sequence[str],
    marks: Sequence[str | None],
    columns: int,
    cell: int = 96,
) -> Picture:
    """Captioned images row by row, each in a square of `cell` pixels, framed if marked "good" or "bad".

    Small images are enlarged by whole factors where there is room: their pixels stay square and sharp.
    """
    from PIL import ImageDraw

    wrapped = [wrap(caption, font_of_size(_CAPTION_SIZE), cell) for caption in captions]
    caption_height = (_CAPTION_SIZE + 3) * max((len(lines) for lines in wrapped), default=0)
    columns = max(1, min(columns, len(images)))
    num_rows = -(-len(images) // columns)
    step_x, step_y = cell + _MARGIN, cell + _GAP + caption_height + _MARGIN
    page = _blank(columns * step_x + _MARGIN, num_rows * step_y + _MARGIN)
    draw = ImageDraw.Draw(page)
    for index, (image, lines, mark) in enumerate(zip(images, wrapped, marks, strict=True)):
        left, top = _MARGIN + index % columns * step_x, _MARGIN + index // columns * step_y
        _place_image(page, draw, _fit(image, cell), mark, (left, top, cell))
        for number, line in enumerate(lines):
            middle = (left + cell / 2, top + cell + _GAP + number * (_CAPTION_SIZE + 3))
            draw.text(middle, line, font=font_of_size(_CAPTION_SIZE), fill=_INK, anchor="ma")
    return np.array(page)


def heat_map(matrix: npt.ArrayLike, row_names: Sequence[str], column_names: Sequence[str], title: str) -> Picture:
    """A confusion matrix: true classes down, predicted ones across, coloured by the share of the row.

    Counts are written in for up to thirty classes, names beside them for up to a hundred.
    """
    from PIL import ImageDraw

    counts = np.asarray(matrix)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    cell = _cell_size(max(counts.shape))
    named = max(counts.shape) <= _MOST_NAMED
    font = font_of_size(_AXIS_SIZE if cell >= 20 else 10)
    rows = [cut(name, font, 130) for name in row_names] if named else []
    columns = [cut(name, font, 130) for name in column_names] if named else []
    cells = _colour(shares, cell)
    left = 2 * _MARGIN + _AXIS_SIZE + longest(rows, font)
    top = _MARGIN + _TITLE_SIZE + _GAP + _MARGIN
    names = _name_strip(columns, font, cell, cells.width)
    heading = cut(title, font_of_size(_TITLE_SIZE), 2000)
    width = max(left + cells.width + 90, longest([heading], font_of_size(_TITLE_SIZE)) + 2 * _MARGIN)
    page = _blank(width, top + cells.height + names.height + _AXIS_SIZE + 2 * _GAP + _MARGIN)
    draw = ImageDraw.Draw(page)
    draw.text((_MARGIN, _MARGIN), heading, font=font_of_size(_TITLE_SIZE), fill=_INK)
    page.paste(cells, (left, top))
    draw.rectangle((left - 1, top - 1, left + cells.width, top + cells.height), outline=_LINE)
    page.paste(names, (left, top + cells.height + 1))
    if max(counts.shape) <= _MOST_COUNTED:
        _write_counts(draw, counts, shares, (left, top, round(cell)))
    for index, name in enumerate(rows):
        draw.text((left - _GAP, top + (index + 0.5) * cell), name, font=font, fill=_INK, anchor="rm")
    _write_axes(page, draw, (left, top, cells.width, cells.height), names.height)
    _draw_scale(page, draw, (left + cells.width + _MARGIN + _GAP, top, min(cells.height, 240)))
    return np.array(page)


def save_png(picture: Picture, path: Path) -> None:
    """Write the picture as a PNG file; a file of that name is replaced whole, never seen half-written."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    Image.fromarray(picture).save(aside, format="PNG")
    aside.replace(path)


def _blank(width: int, height: int) -> PillowImage:
    from PIL import Image

    return Image.new("RGB", (width, height), "white")


def _place_image(
    page: PillowImage, draw: ImageDraw, image: PillowImage, mark: str | None, square: tuple[int, int, int]
) -> None:
    left, top, side = square
    x, y = left + (side - image.width) // 2, top + (side - image.height) // 2
    border = 3 if mark else 1
    right, bottom = x + image.width + border - 1, y + image.height + border - 1
    draw.rectangle((x - border, y - border, right, bottom), outline=_FRAMES[mark], width=border)
    page.paste(image, (x, y))


def _fit(image: Picture, side: int) -> PillowImage:
    from PIL import Image

    grey = image.ndim == 3 and image.shape[2] == 1
    whole = Image.fromarray(np.ascontiguousarray(image[..., 0] if grey else image)).convert("RGB")
    factor = side / max(whole.size)
    if factor >= 2:
        factor = int(factor)
    way = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    size = (max(1, round(whole.width * factor)), max(1, round(whole.height * factor)))
    return whole if size == whole.size else whole.resize(size, way)


def _cell_size(num_classes: int) -> float:
    if num_classes <= _MOST_COUNTED:
        return min(72, max(32, 480 // num_classes))
    if num_classes <= _MOST_NAMED:
        return 13
    return max(1000 // num_classes, min(1, 1000 / num_classes))


def _colour(shares: Shares, cell: float) -> PillowImage:
    """White for nothing, then blue, rising fast at first so that rare mistakes show."""
    from PIL import Image

    position = shares**0.6 * (len(_COLOURS) - 1)
    below = np.minimum(position.astype(int), len(_COLOURS) - 2)
    share = (position - below)[..., None]
    colours = _COLOURS[below] * (1 - share) + _COLOURS[below + 1] * share
    image = Image.fromarray(colours.round().astype(np.uint8))
    size = (max(1, round(image.width * cell)), max(1, round(image.height * cell)))
    return image.resize(size, Image.Resampling.NEAREST if cell >= 1 else Image.Resampling.BOX)


def _write_counts(draw: ImageDraw, counts: npt.NDArray[Any], shares: Shares, corner: tuple[int, int, int]) -> None:
    left, top, cell = corner
    room = cell - 6
    texts = {place: _short_count(int(count), room) for place, count in np.ndenumerate(counts) if count}
    font = next(
        (font for font in map(font_of_size, (13, 12, 11)) if longest(list(texts.values()), font) <= room),
        font_of_size(10),
    )
    for (row, column), text in texts.items():
        middle = (left + (column + 0.5) * cell, top + (row + 0.5) * cell)
        draw.text(middle, text, font=font, fill="white" if shares[row, column] > 0.4 else _INK, anchor="mm")


def _short_count(count: int, room: int) -> str:
    if font_of_size(10).getlength(str(count)) <= room:
        return str(count)
    return f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def _name_strip(names: Sequence[str], font: Font, cell: float, width: int) -> PillowImage:
    """The names side by side, each under its cell; upright if one of them is wider than a cell."""
    from PIL import Image, ImageDraw

    widest = longest(names, font)
    upright = widest > cell - 6
    strip = Image.new("RGB", (width, _GAP + (widest if upright else _AXIS_SIZE + 5) if names else 0), "white")
    turned = strip.transpose(Image.Transpose.ROTATE_270) if upright else strip
    draw = ImageDraw.Draw(turned)
    for index, name in enumerate(names):
        middle = (index + 0.5) * cell
        if upright:
            draw.text((turned.width - _GAP, middle), name, font=font, fill=_INK, anchor="rm")
        else:
            draw.text((middle, _GAP), name, font=font, fill=_INK, anchor="ma")
    return turned.transpose(Image.Transpose.ROTATE_90) if upright else strip


def _write_axes(page: PillowImage, draw: ImageDraw, box: tuple[int, int, int, int], names_height: int) -> None:
    from PIL import Image, ImageDraw

    left, top, width, height = box
    font = font_of_size(_AXIS_SIZE)
    below = top + height + names_height + _GAP
    draw.text((left + width / 2, below), "predicted", font=font, fill=_INK, anchor="ma")
    label = _blank(longest(["true"], font) + 2, _AXIS_SIZE + 4)
    ImageDraw.Draw(label).text((0, 0), "true", font=font, fill=_INK)
    label = label.transpose(Image.Transpose.ROTATE_90)
    page.paste(label, (_MARGIN - 4, top + (height - label.height) // 2))


def _draw_scale(page: PillowImage, draw: ImageDraw, place: tuple[int, int, int]) -> None:
    left, top, height = place
    scale = _colour(np.linspace(1, 0, height)[:, None], 1).resize((12, height))
    page.paste(scale, (left, top))
    draw.rectangle((left - 1, top - 1, left + 12, top + height), outline=_LINE)
    for share in (1.0, 0.5, 0.0):
        position = (left + 18, top + (1 - share) * height)
        draw.text(position, f"{share:.0%}", font=font_of_size(10), fill=_INK, anchor="lm")
