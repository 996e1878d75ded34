"""Splits and folds that a column of a list tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.counting import listed
from paceline.core.errors import DataError
from paceline.data.indexes.index_file import Column, Index
from paceline.data.indexes.index_writer import IndexWriter

_MOST = 100  # splits of a list
_SHOWN = 10


class ListedParts:
    """Takes what stands in the column of splits or folds, and keeps the numbers of the rows of each in an index."""

    def __init__(self, writer: IndexWriter, file: Path) -> None:
        self._writer, self._file = writer, file
        self._names: dict[str, int] = {}
        self._size = 0

    def append(self, words: Sequence[Any]) -> None:
        """The words of the next rows."""
        stripped = [str(word).strip() for word in words]
        numbers = np.array([self._names.setdefault(name, len(self._names)) for name in stripped])
        if len(self._names) > _MOST:
            some = listed(list(self._names), _SHOWN)
            raise DataError(f"{self._file}: the column of splits or folds has more than {_MOST}: {some}; name another")
        for number in np.unique(numbers):
            self._writer.numbers(f"listed.{number}", np.flatnonzero(numbers == number) + self._size)
        self._size += len(words)

    def finish(self) -> None:
        """Write the names."""
        self._writer.texts("listed", [name.encode(errors="surrogatepass") for name in self._names])


def read_listed_part(index: Index, file: Path, split: str | None, column: str | int) -> Column:
    """The numbers of the rows of a split."""
    names = _names(index)
    if split not in names:
        counts = [f"{name} ({len(index.numbers(f'listed.{number}')):,})" for number, name in enumerate(names)]
        found = f"the column {column!r} has {listed(counts, _SHOWN)}"
        raise DataError(f"{file}: no line is of the split {split!r}; {found}; give one of these as `split`")
    return index.column(f"listed.{names.index(split)}")


def read_fold(index: Index, file: Path, fold: int, is_held_out: bool) -> Column | NDArray[np.int64]:
    """The numbers of the rows of a fold, or of all others."""
    names = _names(index)
    if str(fold) not in names:
        found = f"the folds are {listed(sorted(names), _SHOWN)}"
        raise DataError(f"{file}: no line is in fold {fold}; {found}; give another fold or fold_column")
    if is_held_out:
        return index.column(f"listed.{names.index(str(fold))}")
    others = [index.numbers(f"listed.{number}") for number, name in enumerate(names) if name != str(fold)]
    if not others:
        raise DataError(f"{file}: all lines are in fold {fold}, so none are left to train on")
    return np.sort(np.concatenate(others).astype(np.int64))


def _names(index: Index) -> list[str]:
    return [name.decode(errors="surrogatepass") for name in index.texts("listed")]
