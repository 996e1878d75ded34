"""The losses and training metrics of one step, over its micro-batches, divided by the counts of the global batch.

A loss is a sum and a count (`LossTerm`). Dividing by the count of the whole global batch makes the step independent of
the number of processes and of accumulation, in the last, smaller batch of an epoch too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.errors import TrainingError
from paceline.core.world import World
from paceline.data.loader import MicroBatch
from paceline.losses.loss_term import Count, LossTerm

Numbers = npt.NDArray[np.float64]
Columns = dict[str, list[float]]
"""Losses and metrics of steps: by name, a number for each step."""
Counts = Mapping[str, Count]
"""The count of each loss in a micro-batch; None where it depends on predictions (a ratio loss)."""
Value = Tensor | float
"""A loss or a metric of a micro-batch that waits to be read."""
Divisors = Callable[[Mapping[str, float]], Mapping[str, float]]
"""What losses are divided by, given their counts over the global batch."""
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

    def scale(self, term: LossTerm, weight: float) -> WeightedLoss:
        """What to back-propagate; over all micro-batches, the gradients add up to that of the global batch."""
        if self.count_on_device is None:
            return WeightedLoss(term.numerator, weight / self.count)
        numerator = term.numerator if self.ratio is None else term.numerator - self.ratio * term.denominator
        return WeightedLoss(numerator / self.count_on_device, weight)

    def undivided(self, term: LossTerm) -> Tensor:
        """The value to log; over all micro-batches, these add up to the loss of the global batch times `count`."""
        if self.count_on_device is None:
            return term.numerator
        return term.numerator.detach() / self.count_on_device


class LossAccumulator:
    """The losses of one step, as far as this rank computes them, kept on the device until `read`.

    Counts, and whether a rank was asked to stop, travel in one small all-reduce that overlaps the forward pass. Counts
    that are on a device stay there.
    """

    __slots__ = (
        "_counts_on_device", "_divisors", "_unfinished", "_world", "metrics", "normalizers", "num_micro_batches",
        "parts", "should_stop", "weights",
    )  # fmt: skip

    def __init__(
        self, weights: Mapping[str, float], num_micro_batches: int, counts: Iterable[tuple[MicroBatch, Counts]],
        world: World, stop_requested: bool, first_pass: FirstPass, metrics: Sequence[str] = (),
        divisors: Divisors = dict,
    ) -> None:  # fmt: skip
        self.weights = weights
        self.metrics = metrics
        """Names of terms that are logged and not minimized."""
        self.num_micro_batches = num_micro_batches
        self.parts: list[tuple[int, list[Value]]] = []
        self.normalizers: dict[str, Normalizer] = {}
        self.should_stop = False
        self._world, self._divisors = world, divisors
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
        self._unfinished: tuple[Callable[[], list[float]], FirstPass] | None = world.start_sum(numbers), first_pass
        if any(numbers[ratios:on_device]):  # the first pass of ratio losses comes before all others
            self.wait()

    def to_backward(self, terms: Mapping[str, LossTerm], micro: MicroBatch, factor: float = 1.0) -> list[WeightedLoss]:
        """The losses of a micro-batch, ready for the backward pass; a padding micro-batch has gradient 0."""
        self.wait()
        factor = 0.0 if micro.is_padding else factor
        if len(self.normalizers) < len(self.weights):  # a ratio loss in a step of one micro-batch
            for name in self.weights.keys() - self.normalizers:
                numerator, count = terms[name].numerator, torch.as_tensor(terms[name].denominator)
                self.normalizers[name] = _ratio(numerator.detach(), count.detach())
        if not any(terms[name].numerator.requires_grad for name in self.weights):
            raise TrainingError(
                f"loss {', '.join(self.weights)}: has no gradient, so nothing would be learned; compute it from the"
                " output, without detach(), .item(), torch.no_grad() or NumPy, and leave some parameters unfrozen"
            )
        return [self.normalizers[name].scale(terms[name], weight * factor) for name, weight in self.weights.items()]

    def add(self, terms: Mapping[str, LossTerm], micro: MicroBatch) -> None:
        """Keep the losses and metrics of a micro-batch for logging."""
        if micro.is_padding:
            return
        values: list[Value] = [_unread(self.normalizers[name].undivided(terms[name])) for name in self.weights]
        for name in self.metrics:
            term = terms.get(name)
            values += (0.0, 0.0) if term is None else (_unread(term.numerator), _unread(term.denominator))
        self.parts.append((micro.index, values))

    def wait(self) -> None:
        """Wait for the all-reduce, once; with ratio losses, take the first pass."""
        if self._unfinished is None:
            return
        (finish, first_pass), self._unfinished = self._unfinished, None
        *sums, stop = finish()
        self.should_stop = stop > 0
        width = len(self.weights)
        end = self.num_micro_batches * width
        counts = {name: sum(sums[place:end:width]) for place, name in enumerate(self.weights)}
        self.normalizers = {name: Normalizer(count or 1.0) for name, count in self._divisors(counts).items()}
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
            sums_of_all = first_pass(ratios)
            for name, numerator, count in zip(ratios, sums_of_all[::2], sums_of_all[1::2], strict=True):
                self.normalizers[name] = _ratio(numerator, count)

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
        columns = _columns([self], _table([self]))
        return {name: torch.tensor(columns[name][0], dtype=torch.float64) for name in ("loss", *self.weights)}


def _is_on_host(count: Tensor) -> bool:
    return count.is_cpu


def _unread(value: Tensor | float) -> Tensor | float:
    """A number to keep, without its graph: of a CPU as a number at once, where reading waits for nothing."""
    if not isinstance(value, Tensor):
        return value
    return float(value.item()) if value.is_cpu else value.detach()


def _ratio(numerator: Tensor, count: Tensor) -> Normalizer:
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


def read(steps: Sequence[LossAccumulator], world: World) -> Columns:
    """The losses and metrics of whole steps, read from the device at once: "loss", then each by name.

    Every micro-batch has its own place in one table to which each rank adds zeros or its own numbers, so the sum over
    ranks is exact; micro-batches are then added in order: bit-identical on any number of processes.
    """
    if not steps:
        return {}
    table = world.sum(torch.from_numpy(_table(steps))).numpy()  # on the host: some devices have no float64
    return _columns(steps, table)


def _table(steps: Sequence[LossAccumulator]) -> Numbers:
    """This rank's numbers, [step, micro-batch, loss]."""
    depth = max(step.num_micro_batches for step in steps)
    width = len(steps[0].weights) + 2 * len(steps[0].metrics)
    parts = [values for step in steps for _, values in step.parts]
    numbers = np.array(read_columns(list(zip(*parts, strict=True)))).T.copy()
    if depth == 1 and len(parts) == len(steps):
        return numbers[:, np.newaxis]
    table = np.zeros((len(steps), depth, width))
    if parts:
        rows = [row for row, step in enumerate(steps) for _ in step.parts]
        table[rows, [index for step in steps for index, _ in step.parts]] = numbers
    return table


@np.errstate(invalid="ignore", over="ignore")
def _columns(steps: Sequence[LossAccumulator], table: Numbers) -> Columns:
    """Losses and metrics by name, of a table of sums and counts; a metric that counts nothing is NaN."""
    sums = table[:, 0].copy()
    for index in range(1, table.shape[1]):
        sums += table[:, index]
    loss, values = np.zeros(len(steps)), {}
    totals = iter(sums.T)
    for (name, weight), total in zip(steps[0].weights.items(), totals, strict=False):
        values[name] = total / [step.normalizers[name].count if name in step.normalizers else 1.0 for step in steps]
        loss += weight * values[name]
    found = {"loss": loss, **values}
    for name, total, count in zip(steps[0].metrics, totals, totals, strict=True):
        found[name] = np.divide(total, count, out=np.full(len(steps), np.nan), where=count != 0)
    return {name: column.tolist() for name, column in found.items()}


def read_columns(columns: Sequence[Sequence[Value]]) -> list[list[float]]:
    """The values, read from the device at once."""
    tensors = [value for column in columns for value in column if isinstance(value, Tensor)]
    read_at_once = iter(torch.stack(tensors).tolist() if tensors else [])
    return [[next(read_at_once) if isinstance(value, Tensor) else value for value in column] for column in columns]
