"""The losses of updates, kept unread until somebody wants to see them: then all are read and added up at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.mesh import Mesh
from paceline.losses.term import Term

if TYPE_CHECKING:
    from paceline.engine.objective import Total

Numbers = npt.NDArray[np.float64]


class Tally:
    """The losses of one update, as far as this process computed them."""

    __slots__ = ("num_microbatches", "parts", "totals", "weights")

    def __init__(self, weights: Mapping[str, float], num_microbatches: int) -> None:
        self.weights = weights
        self.num_microbatches = num_microbatches
        self.parts: list[tuple[int, list[Tensor]]] = []
        self.totals: Mapping[str, Total] = {}
        """What the parts are parts of; known when the processes have agreed."""

    def add(self, index: int, terms: Mapping[str, Term]) -> None:
        """Take note of micro-batch `index`."""
        self.parts.append((index, [self.totals[name].reported(terms[name]) for name in self.weights]))

    def own(self) -> dict[str, Tensor]:
        """The part of the weighted sum, as "loss", and of each loss that this process computed."""
        sums = _in_order(_table([self]))[0]
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in _figures(self, sums).items()}


def read(tallies: Sequence[Tally], mesh: Mesh) -> list[dict[str, float]]:
    """The losses of whole updates: the weighted sum as "loss", then each by its name.

    Every micro-batch has its own place in one table to which each process adds zeros or its own numbers, so the sum
    over processes is exact, and micro-batches are then added in their order: the same bits on any number of processes.
    """
    if not tallies:
        return []
    table = mesh.sum(torch.from_numpy(_table(tallies)).to(mesh.device)).cpu().numpy()
    return [_figures(tally, row) for tally, row in zip(tallies, _in_order(table), strict=True)]


def _table(tallies: Sequence[Tally]) -> Numbers:
    """This process's numbers, [update, micro-batch, loss]."""
    depth = max(tally.num_microbatches for tally in tallies)
    table = np.zeros((len(tallies), depth, len(tallies[0].weights)))
    rows = [row for row, tally in enumerate(tallies) for _ in tally.parts]
    columns = [index for tally in tallies for index, _ in tally.parts]
    tensors = [value for tally in tallies for _, values in tally.parts for value in values]
    if tensors:
        table[rows, columns] = torch.stack(tensors).double().cpu().numpy().reshape(len(rows), -1)
    return table


def _in_order(table: Numbers) -> list[list[float]]:
    sums = table[:, 0].copy()
    for index in range(1, table.shape[1]):
        sums += table[:, index]
    return cast("list[list[float]]", sums.tolist())


def _figures(tally: Tally, sums: Sequence[float]) -> dict[str, float]:
    values = {name: value / tally.totals[name].divisor for name, value in zip(tally.weights, sums, strict=True)}
    return {"loss": sum(tally.weights[name] * value for name, value in values.items()), **values}
