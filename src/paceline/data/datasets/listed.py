"""Images that a list file names, with their labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.indexes.folders import refuse_escaping_file
from paceline.data.indexes.index import Index, IndexBuilder, open_index
from paceline.data.indexes.labels import LabelBook
from paceline.data.indexes.line_numbers import LineNumbers, find_line
from paceline.data.indexes.listing import Column, Format, Row, at_line, encode_name, read_list
from paceline.data.indexes.splits import read_part, split_arguments, write_parts
from paceline.data.reading.decode import MAX_PIXELS
from paceline.data.reading.encoded import Encoded

_CHUNK = 1 << 14  # lines that are held as Python objects at a time
_SHOWN = 10  # classes without a sample that are named


class ListFile:
    """The images of a list, a line each: names relative to `root`, the list's own folder unless given, and labels.

    The list is a CSV, TSV, JSON-lines or plain text file, told by its name or `format`. `image` and `label` are its
    columns, by name if the first line has names, else by number from 0. Labels are names, which are sorted into
    classes, or numbers of `classes`. With `label_separator`, or lists in JSON, an image has any number of them, and
    "label" is a float32 vector of 0 and 1. With `split_shares` the images are split by chance, and `split` is one
    part. Files that lie outside of the root are a DataError unless `follow_links`.
    """

    channels = 3
    listed = "image"
    """What a line is about, and the usual name of its column."""

    def __init__(
        self,
        file: Path,
        root: Path | None = None,
        format: Format | None = None,  # noqa: A002 - the word for it in recipes
        image: Column | None = None,
        label: Column | None = None,
        label_separator: str | None = None,
        classes: Sequence[str] | None = None,
        split: str | None = None,
        split_shares: Mapping[str, float] | None = None,
        split_seed: int = 0,
        follow_links: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.file = Path(root or "", file)
        self.root = Path(root) if root is not None else self.file.parent
        self.max_pixels = max_pixels
        self._inside = None if follow_links else self.root
        if not self.file.is_file():
            raise DataError(f"{self.file}: no such file; expected a list with a line for each {self.listed}")

        def build(builder: IndexBuilder) -> None:
            builder.watch(self.file)
            rows = read_list(self.file, format, image, label, "label", self.listed)
            size = _write(builder, self.file, rows, label_separator, classes)
            write_parts(builder, size, split_shares, split_seed)

        arguments = {"columns": [format, image, label, label_separator], "classes": classes and list(classes)}
        arguments |= {"file": self.file.name} | split_arguments(split_shares, split_seed)
        self._index = open_index(self.file.parent, "list", arguments, build)
        self._open_columns()
        self._part = read_part(self._index, split, split_shares, len(self._names))

    def _open_columns(self) -> None:
        self._names = self._index.ragged("image")
        self.classes = [name.decode(errors="surrogatepass") for name in self._index.texts("class")]
        self._labels = _Labels(self._index, len(self.classes)) if "meaning" in self._index else None

    def __len__(self) -> int:
        return len(self._part)

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        return self.root / os.fsdecode(self._names[self._part[index]].tobytes())

    def place(self, index: int) -> str:
        """The list, and the line of it that names image `index`."""
        return at_line(self.file, find_line(self._index, int(self._part[index])))

    @property
    def notes(self) -> list[str]:
        """Which classes have no sample."""
        is_seen = [] if self._labels is None else self._labels.seen(self._part)
        absent = [name for name, seen in zip(self.classes, is_seen, strict=False) if not seen]
        shown = ", ".join(absent[:_SHOWN]) + (", …" if len(absent) > _SHOWN else "")
        return [f"no sample of {counted(len(absent), 'class')}: {shown}"] if absent else []

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, and its label if the list has labels."""
        path = self.path(index)
        try:
            refuse_escaping_file(path, self._inside)
            image = Encoded.read(path, self.max_pixels)
        except (DataError, OSError, ValueError) as error:
            raise self._at_its_line(index, error) from error
        return {"image": image} | self._label(index)

    def read(self, index: int) -> Sample:
        """The same with the image decoded, uint8 [H, W, 3]."""
        sample = self.open(index)
        try:
            return {**sample, "image": sample["image"].decode()}
        except DataError as error:
            raise self._at_its_line(index, error) from error

    def _label(self, index: int) -> Sample:
        return {} if self._labels is None else {"label": self._labels[self._part[index]]}

    def _at_its_line(self, index: int, error: Exception) -> DataError:
        return DataError(f"{self.place(index)}: {error}")


class _Labels:
    """The label of each row: a number, or a vector of 0 and 1 where a row may have several."""

    def __init__(self, index: Index, num_classes: int) -> None:
        self._index = index
        self._meaning = index.numbers("meaning")
        self._several = index.ragged("labels") if "labels.values" in index else None
        self._single = index.column("label") if "label" in index else None
        self._num_classes = num_classes

    def seen(self, rows: Any) -> list[bool]:
        """Whether each class is the label of one of these rows; where rows have several labels, of any row at all."""
        if self._single is None:
            numbers = self._index.numbers("labels.values")
        else:
            numbers = self._single.values[np.asarray(getattr(rows, "values", rows))]
        is_seen: list[bool] = np.isin(np.arange(self._num_classes), self._meaning[np.unique(numbers)]).tolist()
        return is_seen

    def __getitem__(self, row: int) -> int | NDArray[np.float32]:
        if self._single is not None:
            return int(self._meaning[self._single[row]])
        vector = np.zeros(self._num_classes, np.float32)
        if self._several is not None:
            vector[self._meaning[self._several[row]]] = 1
        return vector


def _write(
    builder: IndexBuilder, file: Path, rows: Iterator[Row], separator: str | None, classes: Sequence[str] | None
) -> int:
    """The columns of an index, a few lines at a time; returns the number of lines."""
    book, lines, size = LabelBook(file), LineNumbers(builder), 0
    first = next(rows, None)
    if first is None:
        raise DataError(f"{file}: the list has no images; expected a line for each")
    has_several = separator is not None or isinstance(first.beside, list)
    chunk = [first, *islice(rows, _CHUNK - 1)]
    while chunk:
        builder.texts("image", [encode_name(file, row.line, row.image) for row in chunk])
        if has_several:
            _write_several(builder, book, [_split(file, row, separator) for row in chunk], chunk)
        elif first.beside is not None:
            labels = (book.number(_single(file, row), row.line) for row in chunk)
            builder.numbers("label", np.fromiter(labels, np.int32, len(chunk)))
        lines.append([row.line for row in chunk])
        size += len(chunk)
        chunk = list(islice(rows, _CHUNK))
    names = list(classes or [])
    if has_several or first.beside is not None:
        names, meaning = book.classes(classes)
        builder.numbers("meaning", meaning)
    builder.texts("class", [name.encode(errors="surrogatepass") for name in names])
    return size


def _write_several(builder: IndexBuilder, book: LabelBook, labels: list[list[str]], chunk: list[Row]) -> None:
    lengths = np.fromiter(map(len, labels), np.uint32, len(labels))
    numbers = [book.number(each, row.line) for row, of_row in zip(chunk, labels, strict=True) for each in of_row]
    builder.ragged("labels", lengths, np.array(numbers, np.int32))


def _split(file: Path, row: Row, separator: str | None) -> list[str]:
    """Several labels; there may be none."""
    if isinstance(row.beside, list):
        return [_text(file, row.line, label) for label in row.beside]
    if separator is None:
        raise DataError(f"{at_line(file, row.line)}: the label is {row.beside!r}, expected a list as in the first line")
    return [label for label in _text(file, row.line, row.beside).split(separator) if label.strip()]


def _single(file: Path, row: Row) -> str:
    return row.beside if type(row.beside) is str else _text(file, row.line, row.beside)


def _text(file: Path, line: int, label: Any) -> str:
    if not isinstance(label, str | int) or isinstance(label, bool):
        raise DataError(f"{at_line(file, line)}: the label is {label!r}, expected a name or a whole number")
    return str(label)
