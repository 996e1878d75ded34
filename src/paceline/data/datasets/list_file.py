"""Images and labels named by a list file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import AtMostOneOf, Count, CountOrZero, KeyOf, Requires
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.core.regular_file import why_no_file
from paceline.core.text import pluralize
from paceline.data.argument_types import ClassNames, Column, Name, SplitShares
from paceline.data.batch import Sample
from paceline.data.index.folders import hint_on_missing, refuse_escaping_file
from paceline.data.index.index import Index, IndexBuilder, open_index
from paceline.data.index.index_file import Column as IndexColumn
from paceline.data.index.labels import LabelEncoder
from paceline.data.index.list_file import Format, Row, at_line, encode_name, is_file_in, read_list
from paceline.data.index.splits import ListedParts, read_fold, read_listed_part, read_part, split_arguments, write_parts
from paceline.data.index.table_rows import LineNumbers, advice_on_delimiter, find_line
from paceline.data.io.image import MAX_PIXELS, Encoded

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest


Part = IndexColumn | range | NDArray[np.int64]
"""The numbers of the samples of a split among all of a list."""
_SHOWN = 10  # classes without a sample that are named


LIST_CHECKS = [
    KeyOf("split", "split_shares"),
    AtMostOneOf("split_column", "fold", "split_shares"),
    Requires("split", "split_column", "fold", "split_shares"),
    Requires("split_column", "split"),
    Requires("fold", "split"),
]


@register.dataset("list_file", checks=LIST_CHECKS)
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
        label_separator: Name | None = None,
        classes: ClassNames | None = None,
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
        delimiter: Name | None = None,
        label_from: Literal["column", "folder"] = "column",
        first_label: CountOrZero = 0,
        split_column: Column | None = None,
        fold: CountOrZero | None = None,
        fold_column: Column = 3,
    ) -> None:
        _check_arguments(delimiter, label_from, {"label": label, "label_separator": label_separator}, fold, split)
        self.file = Path(root or "", file)
        self.root = Path(root) if root is not None else self.file.parent
        self.max_pixels = max_pixels
        self._inside = None if follow_links else self.root
        if not self.file.is_file():
            raise DataError(f"{self.file}: {why_no_file(self.file)}; {_expected_list(file, root, self.listed)}")

        part_column, part_key = (split_column, "split_column") if fold is None else (fold_column, "fold_column")

        def build(builder: IndexBuilder) -> None:
            builder.watch(self.file, by_content=True)
            is_folder, notes = label_from == "folder", list[str]()
            read = partial(read_list, self.file, format, image, what=self.listed, delimiter=delimiter, notes=notes)
            read = partial(read, part=part_column, part_key=part_key, is_file=partial(is_file_in, self.root))
            rows = with_folders(self.file, read(None, "")) if is_folder else read(label, "label")
            book = LabelEncoder(self.file, None if is_folder else first_label)
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

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the files to a fingerprint, and what the list holds."""
        digest.content(self.file)
        digest.files(self.root, self._names.texts(self._part), f"{self.listed}s")

    @property
    def notes(self) -> list[str]:
        """What is odd about labels, and which classes have no sample."""
        is_seen = [] if self._labels is None else self._labels.seen(self._part)
        absent = [name for name, seen in zip(self.classes, is_seen, strict=False) if not seen]
        shown = ", ".join(absent[:_SHOWN]) + (", …" if len(absent) > _SHOWN else "")
        odd = self._listed_notes() if self._labels is not None else [self.why_no_labels]
        return odd + ([f"no sample of {pluralize(len(absent), 'class')}: {shown}"] if absent else [])

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


def _check_arguments(
    delimiter: str | None, label_from: str, columns: Mapping[str, Column | None], fold: int | None, split: str | None
) -> None:
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '\r\n"'):
        advice = 'a tab is "\\t" in double quotes, and blanks behind delimiters are left out anyway'
        expected = f"expected one character that is neither a line end nor a quote, got {delimiter!r}"
        raise ArgumentError("delimiter", f"{expected}; {advice}")
    given = next((name for name, column in columns.items() if column is not None), None)
    if label_from == "folder" and given is not None:
        raise ArgumentError(given, "label_from: folder takes no column; take this out")
    if fold is not None and split not in ("train", "val", "test"):
        raise ArgumentError(
            "split", f"with fold, expected train (all other folds), val or test (this fold), got {split}"
        )


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


_CHUNK = 1 << 14  # lines that are held as Python objects at a time


def write_list(
    builder: IndexBuilder,
    book: LabelEncoder,
    rows: Iterator[Row],
    separator: str | None,
    classes: Sequence[str] | None,
    what: str,
    notes: list[str],
) -> int:
    """The columns of an index, a few lines at a time; returns the number of lines.

    Reading the rows may add to the notes, which are written when all have been read.
    """
    file, lines, size = book.path, LineNumbers(builder), 0
    parts = ListedParts(builder, file)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{file}: the list has no {what}s; expected a line for each")
    has_several = separator is not None or isinstance(first.beside, list)
    chunk = [first, *islice(rows, _CHUNK - 1)]
    while chunk:
        builder.texts("image", [encode_name(file, row.line, row.image) for row in chunk])
        if has_several:
            _write_several(builder, book, [_split(file, row, separator) for row in chunk], chunk)
        elif first.beside is not None:
            labels = (book.number(_single(file, row), row.line) for row in chunk)
            builder.numbers("label", np.fromiter(labels, np.int32, len(chunk)))
        if first.part is not None:
            parts.append([row.part for row in chunk])
        lines.append([row.line for row in chunk])
        size += len(chunk)
        chunk = list(islice(rows, _CHUNK))
    parts.finish()
    names = list(classes or [])
    if has_several or first.beside is not None:
        names, meaning = book.classes(classes, size)
        notes = notes + book.notes()
        builder.numbers("meaning", meaning)
    builder.texts("class", [name.encode(errors="surrogatepass") for name in names])
    builder.texts("note", [note.encode(errors="replace") for note in notes])
    return size


def with_folders(file: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows with the folder that each file lies in beside it."""
    for row in rows:
        folder = PurePosixPath(row.image).parent.name
        if not folder:
            expected = f"`label_from: folder` takes the label from it, as in jump/{PurePosixPath(row.image).name}"
            raise DataError(f"{at_line(file, row.line)}: {row.image!r} has no folder before it; {expected}")
        yield row._replace(beside=folder)


def _write_several(builder: IndexBuilder, book: LabelEncoder, labels: list[list[str]], chunk: list[Row]) -> None:
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
