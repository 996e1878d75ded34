"""In which number format a run computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor


class FullPrecision:
    """Everything in float32; nothing is scaled."""

    def compute(self) -> AbstractContextManager[None]:
        """Surrounds forward passes."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those of the update."""
        loss.backward()  # type: ignore[no-untyped-call]
