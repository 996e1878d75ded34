"""The losses and training metrics of one step, over its micro-batches, divided by the counts of the global batch.

A loss is a sum and a count (`LossTerm`). Dividing by the count of the whole global batch makes the step independent of
the number of processes and of accumulation, in the last, smaller batch of an epoch too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.world import World
from paceline.data.loader import MicroBatch
from paceline.losses.loss_term import AnyTerm, Count, LazyTerm

Numbers = npt.NDArray[np.float64]
Counts = Mapping[str, Count]
"""The count of each loss in a micro-batch; None where it depends on predictions (a ratio loss)."""
Value = Tensor | float | LazyTerm
"""A loss or a metric of a micro-batch that waits to be read."""
FirstPass = Callable[[list[str]], Tensor]
"""Sums and counts of these ratio losses over the global batch, [2 · names], from passes without gradient."""


class WeightedLoss(NamedTuple):
    """A scalar to back-propagate, and the weight of its gradient."""

    value: Tensor
    weight: float


@dataclass(slots=True)
class Normalizer:
    """Turns one loss of a micro-batch into its share of the loss of the global batch.

    The count D of a ratio loss contains predictions, so it has a gradient: d(N/D) = (dN − L·dD)/D with L = N/D.
    """

    count: float = 1.0
    count_on_device: Tensor | None = None
    """The count where the host does not know it; `count` is 1 then."""
    ratio: Tensor | None = None
    """L of the global batch, of a ratio loss; D is on the device."""

    def scale(self, term: AnyTerm, weight: float) -> WeightedLoss:
        """What to back-propagate; over all micro-batches, the gradients add up to that of the global batch."""
        if self.count_on_device is None:
            return WeightedLoss(term.numerator, weight / self.count)
        numerator = term.numerator if self.ratio is None else term.numerator - self.ratio * term.denominator
        return WeightedLoss(numerator / self.count_on_device, weight)

    def undivided(self, term: AnyTerm) -> Tensor:
        """The value to log; over all micro-batches, these add up to the loss of the global batch times `count`."""
        numerator = term.numerator.detach()
        return numerator if self.count_on_device is None else numerator / self.count_on_device


class LossAccumulator:
    """The losses of one step, as far as this rank computes them, kept on the device until `read`.

    Counts, and whether a rank was asked to stop, travel in one small all-reduce that overlaps the forward pass. Counts
    that are on a device stay there.
    """

    __slots__ = (
        "_counts_on_device", "_first_pass", "_sums", "_world", "metrics", "normalizers", "num_micro_batches", "parts",
        "should_stop", "weights",
    )  # fmt: skip

    def __init__(
        self, weights: Mapping[str, float], num_micro_batches: int, counts: Iterable[tuple[MicroBatch, Counts]],
        world: World, stop_requested: bool, first_pass: FirstPass, metrics: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.weights = weights
        self.metrics = metrics
        """Names of terms that are logged and not minimized."""
        self.num_micro_batches = num_micro_batches
        self.parts: list[tuple[int, list[Value]]] = []
        self.normalizers: dict[str, Normalizer] = {}
        self.should_stop = False
        self._world = world
        self._counts_on_device: list[tuple[int, str, Tensor]] = []
        # A row for each micro-batch, so that the sum does not depend on which rank counted it; then 1 for each ratio
        # loss, for each count on a device, and for a request to stop.
        width = len(weights)
        ratios = num_micro_batches * width
        on_device = ratios + width
        numbers = [0.0] * (on_device + width + 1)
        numbers[-1] = float(stop_requested)
        for micro, known in counts:
            for place, name in enumerate(weights):
                count = known.get(name, 0.0)
                if count is None:
                    numbers[ratios + place] = 1.0
                elif isinstance(count, Tensor) and not _is_on_host(count):
                    numbers[on_device + place] = 1.0
                    self._counts_on_device += [] if micro.is_padding else [(micro.index, name, count)]
                elif not micro.is_padding:
                    numbers[micro.index * width + place] = float(count)
        self._first_pass: FirstPass | None = first_pass
        self._sums = world.start_sum(numbers)
        if any(numbers[ratios:on_device]):  # the first pass of ratio losses comes before all others
            self.wait()

    def to_backward(self, terms: Mapping[str, AnyTerm], micro: MicroBatch, factor: float = 1.0) -> list[WeightedLoss]:
        """The losses of a micro-batch, ready for the backward pass; a padding micro-batch has gradient 0."""
        self.wait()
        factor = 0.0 if micro.is_padding else factor
        if len(self.normalizers) < len(self.weights):  # a ratio loss in a step of one micro-batch
            for name in self.weights.keys() - self.normalizers:
                self.normalizers[name] = _own_ratio(terms[name])
        return [self.normalizers[name].scale(terms[name], weight * factor) for name, weight in self.weights.items()]

    def add(self, terms: Mapping[str, AnyTerm], micro: MicroBatch) -> None:
        """Keep the losses and metrics of a micro-batch for logging."""
        if micro.is_padding:
            return
        values: list[Value] = [self.normalizers[name].undivided(terms[name]) for name in self.weights]
        for name in self.metrics:
            term = terms.get(name)
            if isinstance(term, LazyTerm):
                values += (term, term.denominator)
            else:
                values += (0.0, 0.0) if term is None else (term.numerator.detach(), _number(term.denominator))
        self.parts.append((micro.index, values))

    def wait(self) -> None:
        """Wait for the all-reduce, once; with ratio losses, take the first pass."""
        if self._first_pass is None:
            return
        *sums, stop = self._sums()
        first_pass, self._first_pass = self._first_pass, None
        self.should_stop = stop > 0
        width = len(self.weights)
        end = self.num_micro_batches * width
        for place, name in enumerate(self.weights):
            self.normalizers[name] = Normalizer(sum(sums[place:end:width]) or 1.0)
        if not any(sums[end:]):
            return
        ratios, on_device = (
            [name for name, number in zip(self.weights, sums[start:], strict=False) if number]
            for start in (end, end + width)
        )
        for name in ratios:  # in a step of one micro-batch, known once its forward pass is done
            del self.normalizers[name]
        if on_device:
            self.normalizers |= self._sum_on_device(on_device)
        if ratios and self.num_micro_batches > 1:
            self.normalizers |= _ratios(ratios, first_pass(ratios))

    def _sum_on_device(self, names: list[str]) -> dict[str, Normalizer]:
        """The counts of the global batch where the host does not know them."""
        rows = zeros_to_sum(self.num_micro_batches, len(names), self._world.device)
        for index, name, count in self._counts_on_device:
            rows[index, names.index(name)] = count
        counts = sum_rows(rows, self._world)
        counts = counts.where(counts != 0, 1.0)
        return {name: Normalizer(count_on_device=counts[place]) for place, name in enumerate(names)}

    def own(self) -> dict[str, Tensor]:
        """The weighted sum as "loss", then each loss by name: this rank's share of them."""
        values = _values(self, _in_order(_table([self]))[0])
        return {name: torch.tensor(values[name], dtype=torch.float64) for name in ("loss", *self.weights)}


def _is_on_host(count: Tensor) -> bool:
    return count.is_cpu


def _number(count: Tensor | float) -> Tensor | float:
    return count.detach() if isinstance(count, Tensor) else count


def _ratios(names: list[str], sums: Tensor) -> dict[str, Normalizer]:
    numerators, counts = sums[::2], sums[1::2]
    counts = counts.where(counts != 0, 1.0)  # without a readable sample the loss is 0
    losses = numerators / counts
    return {name: Normalizer(1.0, counts[i], losses[i]) for i, name in enumerate(names)}


def _own_ratio(term: AnyTerm) -> Normalizer:
    numerator, count = term.numerator.detach(), torch.as_tensor(term.denominator).detach()
    count = count.where(count != 0, 1.0)  # without anything to count the loss is 0
    return Normalizer(1.0, count, numerator / count)


def zeros_to_sum(num_micro_batches: int, columns: int, device: torch.device) -> Tensor:
    """A row of numbers for each micro-batch, so that sums do not depend on which rank computed it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(num_micro_batches, columns, dtype=dtype, device=device)


def sum_rows(rows: Tensor, world: World) -> Tensor:
    """The sum of the rows over all ranks, in the order of micro-batches."""
    total = rows.new_zeros(rows.shape[1])
    for row in world.sum(rows):
        total += row
    return total


def read(steps: Sequence[LossAccumulator], world: World) -> list[dict[str, float]]:
    """The losses and metrics of whole steps, read from the device at once: "loss", then each by name.

    Every micro-batch has its own place in one table to which each rank adds zeros or its own numbers, so the sum over
    ranks is exact; micro-batches are then added in order: bit-identical on any number of processes.
    """
    if not steps:
        return []
    table = world.sum(torch.from_numpy(_table(steps))).numpy()  # on the host: some devices have no float64
    return [_values(step, row) for step, row in zip(steps, _in_order(table), strict=True)]


def _table(steps: Sequence[LossAccumulator]) -> Numbers:
    """This rank's numbers, [step, micro-batch, loss]."""
    depth = max(step.num_micro_batches for step in steps)
    width = len(steps[0].weights) + 2 * len(steps[0].metrics)
    rows = [row for row, step in enumerate(steps) for _ in step.parts]
    columns = [index for step in steps for index, _ in step.parts]
    values = [value for step in steps for _, values in step.parts for value in values]
    numbers = np.array(read_numbers(values)).reshape(len(rows), width)
    if depth == 1 and len(rows) == len(steps):
        return numbers[:, np.newaxis]
    table = np.zeros((len(steps), depth, width))
    table[rows, columns] = numbers
    return table


def read_numbers(values: Sequence[Value]) -> list[float]:
    """The values, read from the device at once; lazy terms of one kind and shape are computed together."""
    of_tensors: list[int] = []
    of_inputs: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            of_tensors.append(place)
        elif isinstance(value, LazyTerm):
            of_inputs.setdefault((value.compute, id(value.inputs)), []).append(place)
    numbers: list[Any] = list(values)
    groups: dict[Any, list[list[int]]] = {}
    for places in of_inputs.values():
        term = numbers[places[0]]
        groups.setdefault((term.compute, *[each.shape for each in term.inputs]), []).append(places)
    tables = [_compute([numbers[places[0]] for places in group]) for group in groups.values()]
    parts = [torch.stack([numbers[place] for place in of_tensors])] if of_tensors else []
    found = iter(torch.cat([*parts, *(table.flatten() for table in tables)]).tolist() if parts or tables else [])
    for place in of_tensors:
        numbers[place] = next(found)
    for group, table in zip(groups.values(), tables, strict=True):
        for places in group:
            row = list(islice(found, table.shape[1]))
            for place in places:
                numbers[place] = row[numbers[place].column]
    return numbers


def _compute(terms: list[LazyTerm]) -> Tensor:
    """The numerators of these terms of one kind, [term, column], on their device."""
    inputs = zip(*(term.inputs for term in terms), strict=True)
    return terms[0].compute(*map(torch.stack, inputs))


def _in_order(table: Numbers) -> list[list[float]]:
    sums = table[:, 0].copy()
    for index in range(1, table.shape[1]):
        sums += table[:, index]
    return cast("list[list[float]]", sums.tolist())


def _values(step: LossAccumulator, sums: Sequence[float]) -> dict[str, float]:
    values, loss = {}, 0.0
    for (name, weight), value in zip(step.weights.items(), sums, strict=False):
        values[name] = value / step.normalizers[name].count if name in step.normalizers else value
        loss += weight * values[name]
    found = {"loss": loss, **values}
    rest = sums[len(values) :]
    for name, total, count in zip(step.metrics, rest[::2], rest[1::2], strict=True):
        if count:
            found[name] = total / count
    return found
