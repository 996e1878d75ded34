"""Splits and folds: drawn at random from a seed, or read from a column of a list file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.text import join_first
from paceline.data.index.index_file import Column, Index, IndexWriter
from paceline.data.rng import derive
from paceline.data.sampler import Permutation

_PURPOSE = 0x5917  # keeps the order that samples are drawn in apart from the one they are trained in
_CHUNK = 1 << 16


def draw_parts(size: int, shares: Mapping[str, float], seed: int) -> dict[str, NDArray[np.uint32]]:
    """The numbers of the samples of each part, ascending: disjoint, and together all of them.

    A part has its share of the samples, rounded. The order in which `shares` names the parts does not matter.
    """
    names = sorted(shares)
    sums = [fsum(shares[name] for name in names[:number]) for number in range(len(names) + 1)]
    bounds = [round(size * each / sums[-1]) for each in sums]
    order = Permutation(size, derive(seed, _PURPOSE))
    return {name: _members(order, start, stop) for name, (start, stop) in zip(names, pairwise(bounds), strict=True)}


def _members(order: Permutation, start: int, stop: int) -> NDArray[np.uint32]:
    members = np.empty(stop - start, np.uint32)
    for first in range(start, stop, _CHUNK):
        last = min(first + _CHUNK, stop)
        members[first - start : last - start] = order.permute(0, np.arange(first, last))
    members.sort()
    return members


def write_parts(writer: IndexWriter, size: int, shares: Mapping[str, float] | None, seed: int) -> None:
    """Draw the parts, if there are shares, into an index."""
    for name, members in draw_parts(size, shares, seed).items() if shares and size else ():
        writer.numbers(f"part.{name}", members)


def read_part(index: Index, split: str | None, shares: Mapping[str, float] | None, size: int) -> Column | range:
    """The numbers of the samples of a part that `write_parts` drew; all of them without shares."""
    if not shares or not size:
        return range(size)
    if split is None or split not in shares:
        raise DataError(f"the split {split!r} is none of split_shares, which are {', '.join(shares)}")
    members = index.column(f"part.{split}")
    if not len(members):
        raise DataError(f"the split {split} has no samples: its share is {shares[split]:g} of {size:,}; give it more")
    return members


def split_arguments(shares: Mapping[str, float] | None, seed: int) -> dict[str, Any]:
    """What of an index depends on how it is split; nothing without shares."""
    return {"split_shares": dict(shares), "split_seed": seed} if shares else {}


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
            some = join_first(list(self._names), _SHOWN)
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
        found = f"the column {column!r} has {join_first(counts, _SHOWN)}"
        raise DataError(f"{file}: no line is of the split {split!r}; {found}; give one of these as `split`")
    return index.column(f"listed.{names.index(split)}")


def read_fold(index: Index, file: Path, fold: int, is_held_out: bool) -> Column | NDArray[np.int64]:
    """The numbers of the rows of a fold, or of all others."""
    names = _names(index)
    if str(fold) not in names:
        found = f"the folds are {join_first(sorted(names), _SHOWN)}"
        raise DataError(f"{file}: no line is in fold {fold}; {found}; give another fold or fold_column")
    if is_held_out:
        return index.column(f"listed.{names.index(str(fold))}")
    others = [index.numbers(f"listed.{number}") for number, name in enumerate(names) if name != str(fold)]
    if not others:
        raise DataError(f"{file}: all lines are in fold {fold}, so none are left to train on")
    return np.sort(np.concatenate(others).astype(np.int64))


def _names(index: Index) -> list[str]:
    return [name.decode(errors="surrogatepass") for name in index.texts("listed")]
