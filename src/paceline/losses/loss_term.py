"""The loss contract: a numerator and a denominator, to be divided only once a whole step is known."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.data.batch import Batch


class LossTerm(NamedTuple):
    """One loss of one micro-batch as a fraction; fractions of several micro-batches add part by part."""

    numerator: Tensor
    """A 0-d tensor that carries the gradient."""
    denominator: Tensor | float
    """A plain number where no tensor has to be read for it, else a 0-d tensor."""


class Loss(Protocol):
    """Measures how wrong the outputs of a model are for one micro-batch.

    A loss that remembers something from one micro-batch to the next has `state_dict` and `load_state_dict` too; what
    they hold is saved with the run. It is shown passes that do not count, evaluation included, but remembers none of
    them. On one process it remembers every micro-batch, in order; on several, those of the first process, and every
    process continues with that after each step. With `reproducible: world`, all micro-batches of a step begin with
    the same state and the first one's is kept, on one process too.
    """

    def count(self, batch: Batch) -> float | None:
        """The denominator if it is known before the forward pass, None if it depends on the outputs."""
        ...

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        """The loss of `outputs`, the model's answer to `batch`."""
        ...
