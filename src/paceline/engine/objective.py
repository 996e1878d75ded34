"""The loss contract: every loss is divided by its denominator over the whole update.

So neither the number of processes nor accumulation changes what is minimised, in the last, smaller update neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.data.keys import derive
from paceline.data.loader import MicroBatch, Update
from paceline.losses.term import Term

if TYPE_CHECKING:
    from paceline.engine.run import Run


class Objective(NamedTuple):
    """A scalar to be differentiated, and what its gradient is to be multiplied by."""

    value: Tensor
    factor: float


class Total(Protocol):
    """How one loss of a micro-batch becomes its part of the loss of the whole update."""

    def objective(self, term: Term, weight: float) -> Objective:
        """The part to be differentiated; the parts of an update add up to its gradient."""
        ...

    def reported(self, term: Term) -> Tensor:
        """The part's value; the parts of an update add up to its loss."""
        ...


@dataclass(frozen=True)
class Counted:
    """The denominator of the update was known before its forward passes."""

    denominator: float

    def objective(self, term: Term, weight: float) -> Objective:
        """Numerator over the denominator of the update."""
        return Objective(term.numerator, weight / self.denominator)

    def reported(self, term: Term) -> Tensor:
        """The same without gradient."""
        return term.numerator.detach() / self.denominator


@dataclass(frozen=True)
class Ratio:
    """The denominator contains predictions; loss and denominator of the update come from a first pass.

    d(N/D) = (dN − L·dD)/D with L = N/D, and N and D are sums over micro-batches.
    """

    loss: Tensor
    denominator: Tensor

    def objective(self, term: Term, weight: float) -> Objective:
        """(n − L·d)/D, with L and D constant."""
        return Objective((term.numerator - self.loss * term.denominator) / self.denominator, weight)

    def reported(self, term: Term) -> Tensor:
        """n/D."""
        return term.numerator.detach() / self.denominator


class WholeRatio:
    """The denominator contains predictions, and the update is a single micro-batch."""

    def objective(self, term: Term, weight: float) -> Objective:
        """n/d."""
        return Objective(term.numerator / term.denominator, weight)

    def reported(self, term: Term) -> Tensor:
        """The same without gradient."""
        return self.objective(term, 1.0).value.detach()


def totals(run: Run, update: Update) -> tuple[dict[str, Total], bool]:
    """The denominators of all losses over the update, and whether any process was asked to stop.

    Both travel in the one small reduction that each update has.
    """
    counts = [run.task.counts(micro.batch) for micro in update.microbatches]
    names = list(run.task.weights)
    known = [sum(count[name] or 0.0 for count in counts) for name in names]
    unknown = [float(sum(count[name] is None for count in counts)) for name in names]
    *sums, stop = run.mesh.sum_numbers([*known, *unknown, float(run.stop.requested)])
    found: dict[str, Total] = {name: Counted(total or 1.0) for name, total in zip(names, sums, strict=False)}
    ratios = [name for name, number in zip(names, sums[len(names) :], strict=True) if number]
    if ratios and update.num_microbatches == 1:
        found |= {name: WholeRatio() for name in ratios}
    elif ratios:
        found |= _ratio_totals(run, update, ratios)
    return found, stop > 0


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """The sum of a few scalars, without adding to zero first; zero for none, as on a process without a part."""
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def weighted_sum(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The losses added up, each with its weight."""
    return add_up([value if weights[name] == 1 else weights[name] * value for name, value in losses.items()])


def _ratio_totals(run: Run, update: Update, names: list[str]) -> dict[str, Ratio]:
    """N/D and D of the whole update from a first pass without gradient: same seeds, buffers untouched."""
    with torch.no_grad(), unchanged_buffers(run.model):
        passes = [forward(run, micro) for micro in update.microbatches]
    found = {}
    for name in names:
        # In float64 whatever the model computes in, so that a process without a part adds the same kind of zero.
        numerator = run.mesh.sum(add_up([terms[name].numerator.double() for terms in passes]).to(run.mesh.device))
        denominators = [torch.as_tensor(terms[name].denominator, dtype=torch.float64) for terms in passes]
        denominator = run.mesh.sum(add_up(denominators).to(run.mesh.device))
        found[name] = Ratio(numerator / denominator, denominator)
    return found


def forward(run: Run, micro: MicroBatch) -> dict[str, Term]:
    """The losses of one micro-batch, with generators seeded from (seed, step, micro-batch)."""
    run.mesh.seed(derive(run.seed, micro.step, micro.index))
    batch = run.source.finish(micro.batch, micro.epoch, run.mesh.device)
    with run.precision.compute():
        return run.task.losses(run.model, batch)


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
