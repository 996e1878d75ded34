"""Inputs of lazy terms, kept in memory that is used again until the numerators of many are computed together.

Tensors that are kept as they are leave a gap each wherever the allocator had put them. What the next steps allocate
then moves through memory, which costs small networks several percent of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.losses.loss_term import LazyTerm

_MAX_ROWS = 100
_MAX_BYTES = 2**20  # of all rows, unless one alone has more
_MAX_BLOCKS = 8  # of other shapes, whose memory is used again


class LazyBlock:
    """The inputs of lazy terms of one kind: a row for each micro-batch."""

    __slots__ = ("_compute", "_inputs", "_rows", "num_rows", "numbers")

    def __init__(
        self, compute: Callable[..., Tensor], inputs: Sequence[Tensor], rows: list[tuple[Tensor, ...]]
    ) -> None:
        self._compute = compute
        self._inputs = inputs  # each [rows, ...]
        self._rows = rows  # views of them
        self.num_rows = 0
        self.numbers: list[list[float]] | None = None
        """The numerators once they are read, [rows, columns]; the block takes no more rows then."""

    @classmethod
    def like(cls, term: LazyTerm) -> LazyBlock:
        """An empty block for terms like this one."""
        row_bytes = sum(each.nbytes for each in term.inputs)
        num_rows = max(1, min(_MAX_ROWS, _MAX_BYTES // max(1, row_bytes)))
        inputs = [each.new_empty((num_rows, *each.shape)) for each in term.inputs]
        return cls(term.compute, inputs, list(zip(*(each.unbind() for each in inputs), strict=True)))

    @property
    def is_full(self) -> bool:
        """Whether it has no room for another row."""
        return self.num_rows == len(self._rows)

    def add(self, inputs: tuple[Tensor, ...]) -> int:
        """Copy the inputs of a micro-batch; the number of their row."""
        row = self.num_rows
        torch._foreach_copy_(self._rows[row], inputs)
        self.num_rows = row + 1
        return row

    def numerators(self) -> Tensor:
        """The numerators [rows, columns], on their device."""
        return self._compute(*(each[: self.num_rows] for each in self._inputs))

    def emptied(self) -> LazyBlock:
        """An empty block in the memory of this one, which was read and needs it no more."""
        return LazyBlock(self._compute, self._inputs, self._rows)


class LazyTerms:
    """Keeps the inputs of a run's lazy terms until they are read."""

    def __init__(self) -> None:
        self._blocks: dict[Any, LazyBlock] = {}

    def keep(self, term: LazyTerm) -> tuple[LazyBlock, int]:
        """Copy the inputs of a term, which those of its micro-batch may share; the block and the row that has them."""
        key = (term.compute, *[(each.shape, each.dtype) for each in term.inputs])
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) == _MAX_BLOCKS:
                self._blocks.clear()
            block = self._blocks[key] = LazyBlock.like(term)
        elif block.numbers is not None:
            block = self._blocks[key] = block.emptied()
        elif block.is_full:
            block = self._blocks[key] = LazyBlock.like(term)
        return block, block.add(term.inputs)
