"""The size of a gradient, and keeping it within bounds; each measures all of it before it changes any.

A gradient that is not finite is left as it is: no bound would mend it, and what is wrong with it can still be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

Measure = Callable[[Sequence[nn.Parameter]], Tensor]


class Unclipped:
    """Measures the gradient and leaves it. `across` makes the norm of a part that of the whole."""

    def __init__(self, across: Callable[[Tensor], Tensor] | None = None) -> None:
        self.across = across

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients together."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.zeros(())
        if gradients:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm if self.across is None else self.across(norm)


class NormClip:
    """Scales the gradient down to `limit` if its norm is larger."""

    def __init__(self, limit: float, measure: Measure | None = None) -> None:
        self.limit = limit
        self._measure = measure or Unclipped()

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients together, before clipping."""
        norm = self._measure(parameters)
        if norm.isfinite():
            nn.utils.clip_grads_with_norm_(parameters, self.limit, norm)
        return norm


class ValueClip:
    """Brings each number of the gradient into [-limit, limit]."""

    def __init__(self, limit: float, measure: Measure | None = None) -> None:
        self.limit = limit
        self._measure = measure or Unclipped()

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients together, before clipping."""
        norm = self._measure(parameters)
        for parameter in parameters if norm.isfinite() else ():
            if parameter.grad is not None:
                parameter.grad.clamp_(-self.limit, self.limit)
        return norm


class AdaptiveClip:
    """Keeps the gradient of each unit (a row, a filter; a vector as a whole) within a share of the unit's weights.

    `eps` is the least norm that a unit's weights count with. Parameters in `skip`, such as a head's, are left alone.
    """

    def __init__(self, factor: float = 0.01, eps: float = 1e-3, skip: Iterable[nn.Parameter] = ()) -> None:
        self.factor = factor
        self.eps = eps
        self._skipped = {id(parameter) for parameter in skip}
        self._measure = Unclipped()

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients together, before clipping."""
        norm = self._measure(parameters)
        for parameter in parameters if norm.isfinite() else ():
            if parameter.grad is not None and id(parameter) not in self._skipped:
                limits = _unit_norms(parameter).clamp_(min=self.eps).mul_(self.factor)
                norms = _unit_norms(parameter.grad)
                parameter.grad.mul_(torch.where(norms > limits, limits / norms, 1.0))
        return norm


def _unit_norms(tensor: Tensor) -> Tensor:
    dimensions = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dimensions, keepdim=True)
    return norms
