"""Images that a list file names, with their labels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.datasets.list_writing import with_folders, write_list
from paceline.data.indexes.folders import refuse_escaping_file
from paceline.data.indexes.hints import hint_on_missing
from paceline.data.indexes.index import Index, IndexBuilder, open_index
from paceline.data.indexes.index_file import Column as IndexColumn
from paceline.data.indexes.labels import LabelBook
from paceline.data.indexes.line_numbers import find_line
from paceline.data.indexes.listed_splits import read_fold, read_listed_part
from paceline.data.indexes.listing import Column, Format, at_line, is_file_in, read_list
from paceline.data.indexes.splits import read_part, split_arguments, write_parts
from paceline.data.indexes.table_rows import advice_on_delimiter
from paceline.data.reading.decode import MAX_PIXELS
from paceline.data.reading.encoded import Encoded

Part = IndexColumn | range | NDArray[np.int64]
"""The numbers of the samples of a split among all of a list."""
_SHOWN = 10  # classes without a sample that are named


class ListFile:
    """The images of a list, a line each: names relative to `root`, the list's own folder unless given, and labels.

    The list is a CSV, TSV, JSON or plain text file, told by its name or `format`; `delimiter` separates columns if not
    the usual. `image` and `label` are its columns, by name if the first line has names, else by number from 0. Labels
    are names, which are sorted into classes, or numbers of `classes`, counted from `first_label`; with `label_from`
    "folder" they are the folders that the files lie in. With `label_separator`, or lists in JSON, an image has any
    number of them, and "label" is a float32 vector of 0 and 1. With `split_shares` the images are split by chance, and
    `split` is one part; with `split_column` it is the lines that have this word there; with `fold`, "train" is the
    lines that have another number in `fold_column`, all other splits those that have it. Files that lie outside of the
    root are a DataError unless `follow_links`.
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
        delimiter: str | None = None,
        label_from: Literal["column", "folder"] = "column",
        first_label: int = 0,
        split_column: Column | None = None,
        fold: int | None = None,
        fold_column: Column = 3,
    ) -> None:
        self.file = Path(root or "", file)
        self.root = Path(root) if root is not None else self.file.parent
        self.max_pixels = max_pixels
        self._inside = None if follow_links else self.root
        if not self.file.is_file():
            raise DataError(f"{self.file}: no such file; {_expected_list(file, root, self.listed)}")

        part_column, part_key = (split_column, "split_column") if fold is None else (fold_column, "fold_column")

        def build(builder: IndexBuilder) -> None:
            builder.watch(self.file, by_content=True)
            is_folder, notes = label_from == "folder", list[str]()
            read = partial(read_list, self.file, format, image, what=self.listed, delimiter=delimiter, notes=notes)
            read = partial(read, part=part_column, part_key=part_key, is_file=partial(is_file_in, self.root))
            rows = with_folders(self.file, read(None, "")) if is_folder else read(label, "label")
            book = LabelBook(self.file, None if is_folder else first_label)
            size = write_list(builder, book, rows, label_separator, classes, self.listed, notes)
            write_parts(builder, size, split_shares, split_seed)

        arguments = {"columns": [format, image, label, label_separator], "classes": classes and list(classes)}
        arguments |= {"file": self.file.name, "table": [delimiter, label_from, first_label, part_column, self.listed]}
        arguments |= {"root": os.path.relpath(self.root, self.file.parent)}  # comments are told by what is there
        arguments |= split_arguments(split_shares, split_seed)
        self._index = open_index(self.file.parent, "list", arguments, build)
        self._open_columns()
        self._part: Part
        if fold is not None:
            self._part = read_fold(self._index, self.file, fold, is_held_out=split != "train")
        elif split_column is not None:
            self._part = read_listed_part(self._index, self.file, split, split_column)
        else:
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
        """What is odd about labels, and which classes have no sample."""
        is_seen = [] if self._labels is None else self._labels.seen(self._part)
        absent = [name for name, seen in zip(self.classes, is_seen, strict=False) if not seen]
        shown = ", ".join(absent[:_SHOWN]) + (", …" if len(absent) > _SHOWN else "")
        odd = self._listed_notes() if self._labels is not None else [self.why_no_labels]
        return odd + ([f"no sample of {counted(len(absent), 'class')}: {shown}"] if absent else [])

    def _listed_notes(self) -> list[str]:
        return [note.decode(errors="replace") for note in self._index.texts("note")]

    @property
    def why_no_labels(self) -> str:
        """Why samples have no label, and what to do about it; empty if they have."""
        if self._labels is not None:
            return ""
        name = os.fsdecode(self._names[0].tobytes())
        place = at_line(self.file, find_line(self._index, 0))
        advice = "; ".join(self._listed_notes()) or advice_on_delimiter([name]) or "give a list that has labels"
        return f"{place}: no label beside {name!r}; {advice}, or `label_from: folder` if a folder is a class"

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
        name = os.fsdecode(self._names[self._part[index]].tobytes())
        hint = "" if os.path.lexists(self.root / name) else hint_on_missing(self.root, name)
        return DataError(f"{self.place(index)}: {error}{hint}")


def _expected_list(file: Path, root: Path | None, what: str) -> str:
    expected = f"expected a list with a line for each {what}"
    if root is None or Path(file).is_absolute():
        return expected
    found = "; give its whole path, as there is one in the current folder" if Path(file).is_file() else ""
    return f"{expected}; with `root`, `file` is looked for in it{found}"


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
