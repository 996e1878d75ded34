"""Splits that are drawn: each sample belongs to one part, which depends on the seed and its number alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.indexes.index_file import Column, Index
from paceline.data.indexes.index_writer import IndexWriter
from paceline.data.keys import derive
from paceline.data.sampler import Order

_PURPOSE = 0x5917  # keeps the order that samples are drawn in apart from the one they are trained in
_CHUNK = 1 << 16


def draw_parts(size: int, shares: Mapping[str, float], seed: int) -> dict[str, NDArray[np.uint32]]:
    """The numbers of the samples of each part, ascending: disjoint, and together all of them.

    A part has its share of the samples, rounded. The order in which `shares` names the parts does not matter.
    """
    names = sorted(shares)
    sums = [fsum(shares[name] for name in names[:number]) for number in range(len(names) + 1)]
    bounds = [round(size * each / sums[-1]) for each in sums]
    order = Order(size, derive(seed, _PURPOSE))
    return {name: _members(order, start, stop) for name, (start, stop) in zip(names, pairwise(bounds), strict=True)}


def _members(order: Order, start: int, stop: int) -> NDArray[np.uint32]:
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
