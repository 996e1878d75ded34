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
from paceline.core.mapped_arrays import ArrayWriter, Column, MappedArrays
from paceline.core.text import join_first
from paceline.data.rng import derive
from paceline.data.sampler import Permutation

Part = Column | range | NDArray[Any]
"""The rows of an index that belong to a split."""

_PURPOSE = 0x5917  # keeps the order that samples are drawn in apart from the one they are trained in
_CHUNK = 1 << 16
_MAX_PARTS = 100  # splits or folds of a list
_SHOWN = 10


def draw_parts(size: int, shares: Mapping[str, float], seed: int) -> dict[str, NDArray[np.uint32]]:
    """The rows of each split, ascending: disjoint, and together all of them.

    A split has its share of the samples, rounded. The order in which `shares` names the splits does not matter.
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


def write_parts(writer: ArrayWriter, size: int, shares: Mapping[str, float] | None, seed: int) -> None:
    """Draw the splits, if there are shares, into an index."""
    for name, members in draw_parts(size, shares, seed).items() if shares and size else ():
        writer.append(f"part.{name}", members)


def read_part(index: MappedArrays, split: str | None, shares: Mapping[str, float] | None, size: int) -> Part:
    """The rows of a split that `write_parts` drew; all of them without shares."""
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


class SplitColumn:
    """Takes the words of a list's column of splits or folds, and writes the rows of each word into an index."""

    def __init__(self, writer: ArrayWriter, file: Path) -> None:
        self._writer, self._file = writer, file
        self._names: dict[str, int] = writer.facts.setdefault("listed", {})
        self._size = 0

    def append(self, words: Sequence[Any]) -> None:
        """The words of the next rows."""
        numbers = np.array([self._names.setdefault(str(word).strip(), len(self._names)) for word in words])
        if len(self._names) > _MAX_PARTS:
            some = join_first(list(self._names), _SHOWN)
            found = f"the column of splits or folds has more than {_MAX_PARTS} different words: {some}"
            raise DataError(f"{self._file}: {found}; name another column")
        for number in np.unique(numbers):
            self._writer.append(f"listed.{number}", np.flatnonzero(numbers == number) + self._size)
        self._size += len(words)


def read_listed_split(index: MappedArrays, file: Path, split: str | None, column: str | int) -> Part:
    """The rows that have a split's name in the column of splits."""
    names: dict[str, int] = index.facts["listed"]
    if split not in names:
        counts = [f"{name} ({len(index[f'listed.{number}']):,})" for name, number in names.items()]
        found = f"the column {column!r} has {join_first(counts, _SHOWN)}"
        raise DataError(f"{file}: no line is of the split {split!r}; {found}; give one of these as `split`")
    return index.column(f"listed.{names[split]}")


def read_fold(index: MappedArrays, file: Path, fold: int, is_held_out: bool) -> Part:
    """The rows of a fold, or of all others."""
    names: dict[str, int] = index.facts["listed"]
    if str(fold) not in names:
        found = f"the folds are {join_first(sorted(names), _SHOWN)}"
        raise DataError(f"{file}: no line is in fold {fold}; {found}; give another fold or fold_column")
    if is_held_out:
        return index.column(f"listed.{names[str(fold)]}")
    others = [index[f"listed.{number}"] for name, number in names.items() if name != str(fold)]
    if not others:
        raise DataError(f"{file}: all lines are in fold {fold}, so none are left to train on")
    return np.sort(np.concatenate(others).astype(np.int64))
