"""The loss contract: a numerator and a denominator, to be divided only once a whole update is known."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.data.batch import Batch


class Term(NamedTuple):
    """One loss of one micro-batch as a fraction; fractions of several micro-batches add part by part."""

    numerator: Tensor
    """A 0-d tensor that carries the gradient."""
    denominator: Tensor | float
    """A plain number where no tensor has to be read for it, else a 0-d tensor."""


class Loss(Protocol):
    """Measures how wrong the outputs of a model are for one micro-batch."""

    def count(self, batch: Batch) -> float | None:
        """The denominator if it is known before the forward pass, None if it depends on the outputs."""
        ...

    def __call__(self, outputs: Tensor, batch: Batch) -> Term:
        """The loss of `outputs`, the model's answer to `batch`."""
        ...
