"""The loss contract: a numerator and a denominator, divided once those of the global batch are known."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.data.batch import Batch


class LossTerm(NamedTuple):
    """One loss of one micro-batch as a fraction; numerators and denominators of micro-batches add up."""

    numerator: Tensor
    """A 0-d tensor: of a loss with its graph, of a metric any scalar."""
    denominator: Tensor | float
    """A plain number where that needs no tensor to be read, otherwise a 0-d tensor."""


Count = Tensor | float | None
"""What a loss is divided by: a number, or a 0-d tensor that stays on its device; None if outputs decide."""


class Loss(Protocol):
    """The loss of a model's outputs for one micro-batch.

    One that cannot be computed for every batch has `check(batch)` too: the number of the first sample that is wrong
    and a message, or None. It is called where data is loaded, with a batch on the host.
    A loss with state has `state_dict` and `load_state_dict` too; the state is saved with the run. Passes that do not
    train, such as evaluation, leave it unchanged. One process updates it with every micro-batch, in order. Several
    processes keep the state of rank 0, and all continue with it after each step. With `reproducible: world`, all
    micro-batches of a step start from the same state and that of the first is kept, on one process too.
    """

    def count(self, batch: Batch) -> Count:
        """The denominator if it is known before the forward pass, None if it depends on the outputs.

        It is computed without reading a value from a device: as a tensor where it depends on values.
        """
        ...

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm: ...
