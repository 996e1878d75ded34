"""Boxes in a CSV file, a box per line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from paceline.core.arguments import CountOrZero, KeyOf, Requires
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import open_regular, why_no_file
from paceline.data.argument_types import ClassNames, Column, Delimiter, Name, SplitShares
from paceline.data.datasets.detection import (
    BadBoxes,
    BoxObject,
    DetectionDataset,
    Problems,
    class_index,
    finite_or_nan,
    write_boxes,
)
from paceline.data.index.folders import read_sizes
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.index.list_file import encode_name, sniff_delimiter, table_lines

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
_CORNERS = (("xmin", "x1", "left", "x"), ("ymin", "y1", "top", "y"))
_ENDS = (("xmax", "x2", "right"), ("ymax", "y2", "bottom"))
_SIDES = (("width", "w"), ("height", "h"))
_CENTER = (("cx", "x_center", "x"), ("cy", "y_center", "y"))
_BOX_WORDS = {"xyxy": (*_CORNERS, *_ENDS), "xywh": (*_CORNERS, *_SIDES), "cxcywh": (*_CENTER, *_SIDES)}
_IMAGE_WORDS = ("image", "filename", "file_name", "file", "path", "image_path", "image_id", "img")
_LABEL_WORDS = ("label", "class", "class_name", "category", "name")
_HEAD = 1 << 12


@register.dataset("box_list", checks=[KeyOf("split", "split_shares"), Requires("split", "split_shares")])
class BoxList(DetectionDataset):
    """The images that a CSV file names, in the order in which they come, with a box in each line.

    Columns go by the usual words of a header (image, xmin, ymin, xmax, ymax, label and their like), or by name or
    number as `image`, `box` and `label`. `box_format` is torchvision's: corners (xyxy), a corner and the sides (xywh)
    or the center and the sides (cxcywh), in pixels. A line without numbers names an image without objects. Images
    are relative to `root`, the list's own folder unless given. With `split_shares` the split is drawn.
    """

    def __init__(
        self,
        file: Path,
        root: Path | None = None,
        image: Column | None = None,
        box: Annotated[Sequence[Column], Field(min_length=4, max_length=4)] | None = None,
        label: Column | None = None,
        box_format: BoxFormat = "xyxy",
        classes: ClassNames | None = None,
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
        delimiter: Delimiter | None = None,
    ) -> None:
        self.file = Path(root or "", file)
        base = Path(root) if root is not None else self.file.parent
        if not self.file.is_file():
            raise DataError(f"{self.file}: {why_no_file(self.file)}; expected a CSV file with a box per line")

        def build(builder: IndexBuilder) -> None:
            builder.watch(self.file, by_content=True)
            lines = _read(self.file, delimiter)
            asked: list[Column | None] = [image, *(box if box is not None else 4 * [None]), label]
            columns = _find_columns(self.file, lines[0][1], asked, box_format)
            rows = _rows(self.file, lines, columns)
            images = {name: number for number, name in enumerate(dict.fromkeys(row.image for row in rows))}
            written = sorted((row for row in rows if row.box), key=lambda row: images[row.image])
            numbers = class_index(self.file, ((row.label, f"line {row.line}") for row in written), classes)
            objects = [
                BoxObject(images[row.image], numbers[row.label], _corners(row.box, box_format), row.place(self.file))
                for row in written
            ]
            builder.facts["classes"] = list(numbers)
            builder.append_texts("file", [encode_name(self.file, 0, name) for name in images])
            write_boxes(builder, objects, read_sizes([base / name for name in images], builder), bad_boxes)

        arguments: dict[str, Any] = {"file": self.file.name, "columns": [image, box, label, delimiter, box_format]}
        arguments |= {"classes": classes and list(classes), "root": str(base.absolute()), "bad_boxes": bad_boxes}
        index = open_index(self.file.parent, "boxes", arguments, build)
        inside = None if follow_links else base
        super().__init__(index, base, inside, self.file, split, split_shares, split_seed)


class _Row(NamedTuple):
    line: int
    image: str
    box: Sequence[float]
    """Four numbers; none for an image without objects."""
    label: str

    def place(self, path: Path) -> str:
        """Where it is written, and what."""
        return f"{path}, line {self.line} ({self.label}), {' '.join(f'{value:g}' for value in self.box)}"


class _Columns(NamedTuple):
    """Where the columns are, and whether the first line is a header."""

    image: int
    box: list[int]
    label: int | None
    has_header: bool


def _find_columns(path: Path, first: Sequence[str], asked: Sequence[Column | None], box_format: BoxFormat) -> _Columns:
    """The columns of the image, the four numbers and the label, each as it is asked for, or else by the usual words."""
    words = [cell.strip().lower() for cell in first]
    usual = [_IMAGE_WORDS, *_BOX_WORDS[box_format], _LABEL_WORDS]
    has_header = any(isinstance(each, str) for each in asked) or any(
        word in words for each in usual[:-1] for word in each
    )
    has_label = asked[-1] is not None or not has_header or any(word in words for word in _LABEL_WORDS)

    def place(number: int, column: Column | None) -> int:
        if isinstance(column, int):
            return column
        if not has_header:
            return number
        names = [column.lower()] if column is not None else usual[number]
        found = next((words.index(name) for name in names if name in words), None)
        if found is None:
            advice = "give the columns as `image`, `box` (four of them) and `label`"
            raise DataError(f"{path}: no column {names[0]!r} in its first line, which has {', '.join(first)}; {advice}")
        return found

    image, *box = (place(number, column) for number, column in enumerate(asked[:-1]))
    return _Columns(image, box, place(5, asked[-1]) if has_label else None, has_header)


def _read(path: Path, delimiter: str | None) -> list[tuple[int, list[str]]]:
    form: Literal["csv", "tsv"] = "tsv" if path.suffix.lower() == ".tsv" else "csv"
    with TextIOWrapper(open_regular(path), "utf-8-sig", "surrogateescape", "") as file:
        head = file.read(_HEAD)
        file.seek(0)
        lines = list(table_lines(path, file, form, delimiter or sniff_delimiter(head, form)))
    if not lines:
        raise DataError(f"{path}: the list is empty; expected a line for each box")
    return lines


def _rows(path: Path, lines: Sequence[tuple[int, list[str]]], columns: _Columns) -> list[_Row]:
    problems, rows = Problems(path), list[_Row]()
    needed = max(columns.image, *columns.box, columns.label or 0)
    for line, cells in lines[columns.has_header :]:
        if len(cells) <= needed:
            problems.add(f"lines of fewer than {needed + 1} columns", f"line {line}")
            continue
        name, texts = cells[columns.image].strip(), [cells[place].strip() for place in columns.box]
        label = "object" if columns.label is None else cells[columns.label].strip()
        numbers = [finite_or_nan(text) for text in texts]
        if not name:
            problems.add("lines without the name of an image", f"line {line}")
        elif not any(texts):
            rows.append(_Row(line, name, (), ""))
        elif any(map(math.isnan, numbers)):
            problems.add("boxes that are not four numbers", f"line {line} ({', '.join(texts)})")
        elif not label:
            problems.add("boxes without a label", f"line {line}")
        else:
            rows.append(_Row(line, name, numbers, label))
    problems.refuse()
    if not rows:
        raise DataError(f"{path}: the list has no boxes; expected a line for each")
    return rows


def _corners(box: Sequence[float], box_format: BoxFormat) -> list[float]:
    x, y, width, height = box
    if box_format == "xyxy":
        return [x, y, width, height]
    if box_format == "cxcywh":
        x, y = x - width / 2, y - height / 2
    return [x, y, x + width, y + height]
