"""The line of a list that each of its samples stands in, kept as what differs from counting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.data.indexes.index_file import Index
from paceline.data.indexes.index_writer import IndexWriter


class LineNumbers:
    """Notes where the distance of a sample's number and its line changes: hardly ever, unless lines are empty."""

    def __init__(self, writer: IndexWriter) -> None:
        self._writer = writer
        self._size, self._distance = 0, -1

    def append(self, lines: Sequence[int]) -> None:
        """The lines of the next samples."""
        rows = np.arange(self._size, self._size + len(lines))
        distances = np.array(lines, np.int64) - rows
        changed = np.flatnonzero(np.diff(distances, prepend=self._distance))
        self._writer.numbers("line.row", rows[changed])
        self._writer.numbers("line.distance", distances[changed])
        self._size += len(lines)
        self._distance = int(distances[-1])


def find_line(index: Index, row: int) -> int:
    """The line of sample `row`."""
    last = int(np.searchsorted(index.numbers("line.row"), row, side="right")) - 1
    return row + int(index.numbers("line.distance")[last])
