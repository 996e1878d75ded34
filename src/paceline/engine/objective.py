"""The loss contract: every loss is divided by its denominator over the whole update.

So neither the number of processes nor accumulation changes what is minimised, in the last, smaller update neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.data.keys import derive
from paceline.data.loading.loader import MicroBatch, Update
from paceline.losses.term import Term

if TYPE_CHECKING:
    from paceline.engine.run import Run


class Objective(NamedTuple):
    """A scalar to be differentiated, and what its gradient is to be multiplied by."""

    value: Tensor
    factor: float


class Total(Protocol):
    """How one loss of a micro-batch becomes its part of the loss of the whole update."""

    @property
    def divisor(self) -> float:
        """What the sum of the reported parts is divided by."""
        ...

    def objective(self, term: Term, weight: float) -> Objective:
        """The part to be differentiated; the parts of an update add up to its gradient."""
        ...

    def reported(self, term: Term) -> Tensor:
        """The part's value; the parts of an update add up to its loss times `divisor`."""
        ...


@dataclass(slots=True)
class Counted:
    """The denominator of the update was known before its forward passes."""

    divisor: float

    def objective(self, term: Term, weight: float) -> Objective:
        """Numerator over the denominator of the update."""
        return Objective(term.numerator, weight / self.divisor)

    def reported(self, term: Term) -> Tensor:
        """The numerator without gradient: dividing can wait until somebody looks."""
        return term.numerator.detach()


@dataclass(frozen=True)
class Ratio:
    """The denominator contains predictions; loss and denominator of the update come from a first pass.

    d(N/D) = (dN − L·dD)/D with L = N/D, and N and D are sums over micro-batches.
    """

    loss: Tensor
    denominator: Tensor
    divisor: float = 1.0

    def objective(self, term: Term, weight: float) -> Objective:
        """(n − L·d)/D, with L and D constant."""
        return Objective((term.numerator - self.loss * term.denominator) / self.denominator, weight)

    def reported(self, term: Term) -> Tensor:
        """n/D."""
        return term.numerator.detach() / self.denominator


class WholeRatio:
    """The denominator contains predictions, and the update is a single micro-batch."""

    divisor = 1.0

    def objective(self, term: Term, weight: float) -> Objective:
        """n/d."""
        return Objective(term.numerator / term.denominator, weight)

    def reported(self, term: Term) -> Tensor:
        """The same without gradient."""
        return self.objective(term, 1.0).value.detach()


class Agreement:
    """What all processes know about an update: each loss's denominator, and whether any was asked to stop.

    Both travel in the one small reduction that an update has; forward passes run while it is under way.
    """

    def __init__(self, run: Run, update: Update) -> None:
        self._run = run
        self._update = update
        self._totals: dict[str, Total] | None = None
        self.should_stop = False
        self.finished = [None if run.source.keeps_counts else finish(run, micro) for micro in update.microbatches]
        """Each micro-batch as the model will see it, if it takes that to count what losses are divided by."""
        # Each micro-batch has its own row, so that adding up does not depend on which process counted it.
        known = [dict.fromkeys(run.task.weights, 0.0) for _ in range(update.num_microbatches)]
        unknown = dict.fromkeys(run.task.weights, 0.0)
        for micro, finished in zip(update.microbatches, self.finished, strict=True):
            for name, count in run.task.counts(finished or micro.batch).items():
                if count is None:
                    unknown[name] = 1.0
                elif not micro.is_ghost:
                    known[micro.index][name] = count
        rows = [count for row in known for count in row.values()]
        self._sums = run.mesh.start_sum([*rows, *unknown.values(), float(run.stop.requested)])
        if any(unknown.values()):  # what a first pass finds out is needed before the others begin
            self.totals()

    def totals(self) -> dict[str, Total]:
        """How each loss becomes its part of the update's; waits for the other processes when first asked."""
        if self._totals is None:
            *sums, stop = self._sums()
            self.should_stop = stop > 0
            self._totals = _totals(self._run, self._update, sums)
        return self._totals


def _totals(run: Run, update: Update, sums: Sequence[float]) -> dict[str, Total]:
    names = list(run.task.weights)
    end = update.num_microbatches * len(names)
    totals = [sum(sums[place : end : len(names)]) for place in range(len(names))]
    found: dict[str, Total] = {name: Counted(total or 1.0) for name, total in zip(names, totals, strict=True)}
    ratios = [name for name, number in zip(names, sums[end:], strict=True) if number]
    if ratios and update.num_microbatches == 1:
        found |= {name: WholeRatio() for name in ratios}
    elif ratios:
        found |= _ratio_totals(run, update, ratios)
    return found


def _ratio_totals(run: Run, update: Update, names: list[str]) -> dict[str, Ratio]:
    """N/D and D of the whole update from a first pass without gradient: same seeds, buffers untouched."""
    # Each micro-batch has its own row, so that adding up does not depend on which process computed it.
    rows = torch.zeros(update.num_microbatches, 2 * len(names), dtype=torch.float64, device=run.mesh.device)
    with torch.no_grad(), unchanged_buffers(run.model):
        for micro in update.microbatches:
            terms = forward(run, micro)
            if not micro.is_ghost:
                parts = [part for name in names for part in (terms[name].numerator, terms[name].denominator)]
                rows[micro.index] = torch.stack(
                    [torch.as_tensor(part, dtype=rows.dtype).to(rows.device) for part in parts]
                )
    sums = rows.new_zeros(2 * len(names))
    for row in run.mesh.sum(rows):
        sums += row
    numerators, denominators = sums[::2], sums[1::2]
    denominators = denominators.where(denominators != 0, 1.0)  # without a sample that can be read, the loss is 0
    losses = numerators / denominators
    return {name: Ratio(losses[i], denominators[i]) for i, name in enumerate(names)}


def finish(run: Run, micro: MicroBatch) -> Batch:
    """The micro-batch on the device, with the transforms of whole batches applied."""
    return run.source.finish(micro.batch, micro.epoch, run.mesh.device, micro.step)


def forward(run: Run, micro: MicroBatch, finished: Batch | None = None) -> dict[str, Term]:
    """The losses of one micro-batch, with generators seeded from (seed, step, micro-batch)."""
    run.heartbeat.beat(micro.step, "in a forward pass")
    started = perf_counter()
    run.mesh.seed(derive(run.seed, micro.step, micro.index))
    batch = finish(run, micro) if finished is None else finished
    with run.precision.compute():
        terms = run.task.losses(run.parallel.network, batch)
    run.forward_seconds += perf_counter() - started
    run.heartbeat.beat(micro.step, "in a backward pass or exchanging gradients")
    return terms


def discarded_pass(run: Run, update: Update) -> None:
    """A forward and a backward pass whose gradients nobody wants."""
    terms = forward(run, update.microbatches[-1])
    run.precision.backward([Objective(term.numerator, 0.0) for term in terms.values()])


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Put the buffers (BatchNorm's running statistics) back afterwards."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in saved:
            buffer.copy_(value)
            setattr(module, name, buffer)  # a forward pass may have put another tensor in its place
