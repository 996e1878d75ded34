"""Images and labels named by a list file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import AtMostOneOf, CountOrZero, KeyOf, Requires
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.core.regular_file import why_no_file
from paceline.core.text import join_first, pluralize
from paceline.data.argument_types import ClassNames, Column, Delimiter, Name, SplitShares
from paceline.data.batch import Sample
from paceline.data.fingerprint import DataDigest
from paceline.data.index.folders import FileDataset, NamedFiles, hint_on_missing
from paceline.data.index.index import (
    IndexBuilder,
    append_split_words,
    drawn_part,
    open_index,
    read_fold,
    read_split_column,
)
from paceline.data.index.list_file import (
    Columns,
    Format,
    Row,
    at_line,
    delimiter_hint,
    encode_name,
    read_list,
)
from paceline.data.io.image import Encoded

LIST_CHECKS = [
    KeyOf("split", "split_shares"),
    AtMostOneOf("split_column", "fold", "split_shares"),
    Requires("split", "split_column", "fold", "split_shares"),
    Requires("split_column", "split"),
    Requires("fold", "split"),
]
_MAX_NAMES = 10  # classes without a sample that are named
_CHUNK = 1 << 14  # lines that are held as Python objects at a time


@register.dataset("list_file", checks=LIST_CHECKS)
class ListFile(FileDataset):
    """The images of a list, a line each: names relative to `root`, the list's own folder unless given, and labels.

    The list is a CSV, TSV, JSON or plain text file, by its extension or `format`; `delimiter` separates columns if not
    the usual one. `image` and `label` are columns, by the name in the header, or by number from 0. Labels are names,
    which are sorted into classes, or numbers of `classes`, counted from `first_label`; with `label_from` "folder" they
    are the folders that the files lie in. With `label_separator`, or lists in JSON, an image has any number of labels,
    and "label" is a float32 vector of 0 and 1. With `split_shares` the split is drawn; with `split_column` it is the
    lines that have its name there; with `fold`, "train" is the lines that have another number in `fold_column`, all
    other splits those that have it. Files outside the root are a DataError unless `follow_links`.
    """

    kind = "image"
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
        delimiter: Delimiter | None = None,
        label_from: Literal["column", "folder"] = "column",
        first_label: CountOrZero = 0,
        split_column: Column | None = None,
        fold: CountOrZero | None = None,
        fold_column: Column = 3,
        stratify: bool = True,
    ) -> None:
        _check_arguments(label_from, {"label": label, "label_separator": label_separator}, fold, split)
        self.file = Path(root or "", file)
        self.root = Path(root) if root is not None else self.file.parent
        if not self.file.is_file():
            where = "; with `root`, `file` is looked for in it" if root is not None else ""
            raise DataError(
                f"{self.file}: {why_no_file(self.file)}; expected a list with a line for each {self.kind}{where}"
            )
        by_folder = label_from == "folder"
        part, part_key = (split_column, "split_column") if fold is None else (fold_column, "fold_column")
        columns = Columns(image, label, part, self.kind, "" if by_folder else "label", part_key)

        def build(builder: IndexBuilder) -> None:
            builder.watch(self.file, by_content=True)
            rows = read_list(self.file, columns, builder.facts["notes"], format, delimiter)
            encoder = LabelEncoder(self.file, None if by_folder else first_label)
            rows = _with_folders(self.file, rows) if by_folder else rows
            _write(builder, encoder, rows, label_separator, classes)

        arguments: dict[str, Any] = {"file": self.file.name, "columns": columns, "classes": classes and list(classes)}
        arguments |= {"format": [format, delimiter, label_separator, first_label]}
        self._index = open_index(self.file.parent, "list", arguments, build)
        self.classes: list[str] = self._index.facts["classes"]
        self._files = NamedFiles(self._index, "file", self.root, None if follow_links else self.root)
        self._several = self._index.rows("labels") if "labels" in self._index else None
        if fold is not None:
            self._part = read_fold(self._index, self.file, fold, is_held_out=split != "train")
        elif split_column is not None:
            self._part = read_split_column(self._index, self.file, split, split_column)
        else:
            is_by_class = stratify and "label" in self._index
            labels = self._index["meaning"][self._index["label"]] if is_by_class else None
            self._part = drawn_part(len(self._files), split, split_shares, split_seed, labels)

    def place(self, index: int) -> str:
        """The list, and the line of it that names sample `index`."""
        return at_line(self.file, int(self._index["line"][self._part[index]]))

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the files to a fingerprint, and the content of the list."""
        digest.content(self.file)
        digest.files(self.root, self._files.names(self._part), f"{self.kind}s")

    @property
    def notes(self) -> list[str]:
        """What is odd about labels, and which classes have no sample; of several labels, in the whole list."""
        if self.why_no_labels:
            return [self.why_no_labels]
        numbers = self._index["label"][np.asarray(self._part)] if self._several is None else self._several.values
        seen = set(self._index["meaning"][np.unique(numbers)].tolist())
        absent = [name for number, name in enumerate(self.classes) if number not in seen]
        if not absent:
            return list(self._index.facts["notes"])
        missing = f"no sample of {pluralize(len(absent), 'class')}: {join_first(absent, _MAX_NAMES)}"
        return [*self._index.facts["notes"], missing]

    @property
    def why_no_labels(self) -> str:
        """Why samples have no label, and what to do about it; empty if they have."""
        if "meaning" in self._index:
            return ""
        name, place = self._files.name(0), at_line(self.file, int(self._index["line"][0]))
        advice = "; ".join(self._index.facts["notes"]) or delimiter_hint([name]) or "give a list that has labels"
        return f"{place}: no label beside {name!r}; {advice}, or `label_from: folder` if a folder is a class"

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, and its label if the list has labels."""
        return {"image": self._load(index, Encoded.read)} | self._label(index)

    def _load(self, index: int, load: Callable[[Path], Any]) -> Any:
        """What `load` gives for a file; an error names its line."""
        try:
            return load(self._files.checked(self._part[index]))
        except (DataError, OSError, ValueError) as error:
            name = self._files.name(self._part[index])
            hint = "" if os.path.lexists(self.root / name) else hint_on_missing(self.root, name)
            raise DataError(f"{self.place(index)}: {error}{hint}") from error

    def _label(self, index: int) -> Sample:
        if "meaning" not in self._index:
            return {}
        row, meaning = self._part[index], self._index["meaning"]
        if self._several is None:
            return {"label": int(meaning[self._index["label"][row]])}
        vector = np.zeros(len(self.classes), np.float32)
        vector[meaning[self._several[row]]] = 1
        return {"label": vector}


def _check_arguments(
    label_from: str, columns: Mapping[str, Column | None], fold: int | None, split: str | None
) -> None:
    given = next((name for name, column in columns.items() if column is not None), None)
    if label_from == "folder" and given is not None:
        raise ArgumentError(given, "label_from: folder takes no column; remove this")
    if fold is not None and split not in ("train", "val", "test"):
        expected = "expected train (all other folds), val or test (this fold)"
        raise ArgumentError("split", f"with fold, {expected}, got {split}")


def _write(
    builder: IndexBuilder,
    encoder: LabelEncoder,
    rows: Iterator[Row],
    separator: str | None,
    classes: Sequence[str] | None,
) -> None:
    """Write the arrays of an index, a few lines at a time."""
    file, size = encoder.path, 0
    first = next(rows, None)
    if first is None:
        raise DataError(f"{file}: the list has no samples; expected a line for each")
    has_several = separator is not None or isinstance(first.label, list)
    rows = chain([first], rows)
    while chunk := list(islice(rows, _CHUNK)):
        builder.append_texts("file", [encode_name(file, row.line, row.name) for row in chunk])
        if first.label is not None and has_several:
            labels = [_several(file, row, separator) for row in chunk]
            numbers = [encoder.number(each, row.line) for row, of in zip(chunk, labels, strict=True) for each in of]
            builder.append_rows("labels", [len(each) for each in labels], np.array(numbers, np.int32))
        elif first.label is not None:
            numbers = [encoder.number(_text(file, row.line, row.label), row.line) for row in chunk]
            builder.append("label", np.array(numbers, np.int32))
        if first.part is not None:
            append_split_words(builder, file, [row.part for row in chunk])
        builder.append("line", np.array([row.line for row in chunk]))
        size += len(chunk)
    builder.facts["classes"] = list(classes or [])
    if first.label is not None:
        builder.facts["classes"], meaning = encoder.classes(classes, size)
        builder.append("meaning", meaning)


def _with_folders(file: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows with the folder that each file lies in as its label."""
    for row in rows:
        folder = PurePosixPath(row.name).parent.name
        if not folder:
            expected = f"`label_from: folder` takes the label from it, as in jump/{PurePosixPath(row.name).name}"
            raise DataError(f"{at_line(file, row.line)}: {row.name!r} has no folder before it; {expected}")
        yield row._replace(label=folder)


def _several(file: Path, row: Row, separator: str | None) -> list[str]:
    """Several labels; there may be none."""
    if isinstance(row.label, list):
        return [_text(file, row.line, label) for label in row.label]
    if separator is None:
        raise DataError(f"{at_line(file, row.line)}: the label is {row.label!r}, expected a list as in the first line")
    return [label for label in _text(file, row.line, row.label).split(separator) if label.strip()]


def _text(file: Path, line: int, label: Any) -> str:
    if type(label) is str:
        return label
    if not isinstance(label, int) or isinstance(label, bool):
        raise DataError(f"{at_line(file, line)}: the label is {label!r}, expected a name or a whole number")
    return str(label)


_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_MANY = 100_000  # classes that hardly any list has


class LabelEncoder:
    """Numbers the different labels of a list as they come; which class each means is known when all are read.

    Whole numbers count classes from `first` on; if that is None, they are names as all others.
    """

    def __init__(self, path: Path, first: int | None = 0) -> None:
        self.path, self._first = path, first
        self._numbers: dict[str, int] = {}
        self._lines: list[int] = []

    def number(self, label: str, line: int) -> int:
        """The number of a label by order of appearance."""
        known = self._numbers.get(label)
        return known if known is not None else self._enter(label.strip(), line)

    def _enter(self, label: str, line: int) -> int:
        if not label:
            raise DataError(f"{at_line(self.path, line)}: the label is empty")
        if any("\udc80" <= character <= "\udcff" for character in label):
            found = label.encode(errors="surrogateescape")
            advice = "save the list as UTF-8; it may be Latin-1 now (`iconv -f LATIN1 -t UTF-8`)"
            raise DataError(f"{at_line(self.path, line)}: the label {found!r} is not UTF-8; {advice}")
        if label not in self._numbers:
            self._numbers[label] = len(self._lines)
            self._lines.append(line)
        return self._numbers[label]

    def classes(self, given: Sequence[str] | None, num_samples: int) -> tuple[list[str], NDArray[np.int32]]:
        """The names of the classes, and the class that each number of a label means.

        Without given names these are the labels, sorted; or as many as the largest label asks for, if all labels are
        whole numbers. More than 100,000 of those, and than ten for each sample, are a DataError.
        """
        labels = list(self._numbers)
        is_counted = self._first is not None and bool(labels) and all(map(_WHOLE.fullmatch, labels))
        names = sorted(labels) if given is None else list(given)
        if is_counted and not (given is not None and set(given).issuperset(labels)):
            return self._counted(given, self._first or 0, num_samples)
        places = {name: place for place, name in enumerate(names)}
        unknown = next((label for label in labels if label not in places), None)
        if unknown is not None:
            expected = f"expected one of the {len(names):,} classes: {join_first(names, _MAX_NAMES)}"
            raise DataError(f"{self._at(unknown)}: the label {unknown!r} is no class; {expected}")
        return names, np.array([places[label] for label in labels], np.int32)

    def _counted(
        self, given: Sequence[str] | None, first: int, num_samples: int
    ) -> tuple[list[str], NDArray[np.int32]]:
        numbers = {int(label): label for label in self._numbers}
        least, largest = min(numbers), max(numbers)
        most = max(_MANY, 10 * num_samples) if given is None else len(given)
        outside = next((number for number in (least, largest) if not 0 <= number - first < most), None)
        if outside is not None:
            samples = pluralize(num_samples, "sample")
            why = f"of {samples}: is it the column of labels?" if given is None else "as `classes` has names"
            found = f"{self._at(numbers[outside])}: the label {numbers[outside]} is out of range"
            advice = f"; labels go from {least} to {largest}: if they begin at {least}, add `first_label: {least}`"
            fits = least != first and least >= 0 and largest - least < most
            raise DataError(f"{found}: expected {first} to {first + most - 1}, {why}{advice if fits else ''}")
        names = list(given) if given is not None else [str(number) for number in range(first, 1 + largest)]
        return names, np.array([int(label) - first for label in self._numbers], np.int32)

    def _at(self, label: str) -> str:
        return at_line(self.path, self._lines[self._numbers[label]])
