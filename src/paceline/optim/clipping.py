"""The size of a gradient, and keeping it within bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Unclipped:
    """Measures the gradient and leaves it."""

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients together."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros(())
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm


class NormClip:
    """Scales the gradient down to `limit` if its norm is larger."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._measure = Unclipped()

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients together, before clipping."""
        norm = self._measure(parameters)
        nn.utils.clip_grads_with_norm_(parameters, self.limit, norm)
        return norm
