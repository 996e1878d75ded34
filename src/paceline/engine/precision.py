"""In which number format a run computes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from paceline.engine.objective import Objective


class FullPrecision:
    """Everything in float32; nothing is scaled."""

    def compute(self) -> AbstractContextManager[None]:
        """Surrounds forward passes."""
        return nullcontext()

    def backward(self, objectives: Sequence[Objective]) -> None:
        """Add the gradients of the objectives to those of the update."""
        # The factors enter where the chain rule starts: a multiplication in the graph would cost several times more.
        roots = [objective for objective in objectives if objective.value.requires_grad]
        factors = [objective.value.new_full((), objective.factor) for objective in roots]
        torch.autograd.backward([objective.value for objective in roots], factors)
