"""Gradient clipping. The norm is measured before anything changes, and no value is read on the host.

A gradient that is not finite is left unchanged: clipping would not repair it, and its cause can still be traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from paceline.core.torch_private import foreach

Norm = Tensor | float
"""The norm of a gradient: a 0-d tensor, or on a CPU also a number."""
Clip = Callable[[Sequence[nn.Parameter]], Norm]
"""Clips the gradients of parameters; returns their 2-norm from before, all of them as one vector."""


class NoClip:
    """Measures the norm alone; `across` turns the norm of a shard into that of the whole."""

    def __init__(self, across: Callable[[Tensor], Tensor] | None = None) -> None:
        self.across = across

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.zeros(())
        if gradients:
            norms = torch.stack(foreach("norm", gradients))
            # Norms of float16 gradients may fit their type where the norm of all does not.
            norm = torch.linalg.vector_norm(norms, dtype=torch.promote_types(norms.dtype, torch.float32))
        return norm if self.across is None else self.across(norm)


class NoClipOnHost(NoClip):
    """The same for gradients on a CPU, in less time: Python adds a few numbers before a kernel has started."""

    def __call__(self, parameters: Sequence[nn.Parameter]) -> float:  # type: ignore[override]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = [norm.item() for norm in foreach("norm", gradients)] if gradients else []
        return math.sqrt(sum(norm * norm for norm in norms))


def norm_alone(device: torch.device, across: Callable[[Tensor], Tensor] | None = None) -> NoClip:
    """What measures the norm and clips nothing, in the fastest way that a device has."""
    return NoClipOnHost() if device.type == "cpu" and across is None else NoClip(across)


class ClipGradNorm(NoClip):
    """Scales all gradients down so that their norm is at most `max_norm`."""

    def __init__(self, max_norm: float, across: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(across)
        self.max_norm = max_norm

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm = super().__call__(parameters)
        # A norm that is not finite counts as 0, which scales by 1.
        nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm.where(norm.isfinite(), 0))
        return norm


class ClipGradValue(NoClip):
    """Clamps each element of the gradients to [-max_value, max_value]."""

    def __init__(self, max_value: float, across: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(across)
        self.max_value = max_value

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm = super().__call__(parameters)
        limit = torch.where(norm.isfinite(), self.max_value, torch.inf)
        for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
            own = limit.to(gradient.dtype)
            gradient.clamp_(-own, own)
        return norm


class AdaptiveClip(NoClip):
    """Adaptive gradient clipping: each unit's gradient norm is at most `factor` times the norm of its weights.

    A unit is a row or a filter; a vector is one unit. `eps` is the smallest weight norm that counts. Parameters in
    `skip`, such as a head's, are not clipped.
    """

    def __init__(self, factor: float = 0.01, eps: float = 1e-3, skip: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()
        self.factor = factor
        self.eps = eps
        self._skipped = {id(parameter) for parameter in skip}

    @torch.no_grad()
    def __call__(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm = super().__call__(parameters)
        is_finite = norm.isfinite()
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in self._skipped:
                limits = _unit_norms(parameter).clamp_(min=self.eps).mul_(self.factor)
                norms = _unit_norms(parameter.grad)
                parameter.grad.mul_(torch.where(is_finite & (norms > limits), limits / norms, 1.0))
        return norm


def _unit_norms(tensor: Tensor) -> Tensor:
    dimensions = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dimensions, keepdim=True)
    return norms
