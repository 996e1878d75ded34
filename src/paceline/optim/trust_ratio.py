"""Trust ratios (LARS, LARC) for any optimizer: each layer's step is bounded by the norm of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.torch_private import foreach


def add_trust_ratio(
    optimizer: Optimizer, coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8, exclude_1d: bool = False
) -> None:
    """Scale every tensor's gradient by coefficient·‖w‖ / (‖g‖ + decay·‖w‖ + eps) before each step.

    With `clip` (LARC) the ratio is an upper bound of the learning rate: the gradient is scaled by min(ratio / lr, 1).
    Without (LARS), the learning rate is multiplied by it. Weight decay is added to the gradient before scaling, even
    with an optimizer that decouples it. With `exclude_1d`, tensors of one dimension are neither scaled nor decayed, as
    in MAE's LARS. There is no state, so checkpoints do not change.
    """
    trust = _TrustRatio(coefficient, clip, eps, exclude_1d)
    optimizer.register_step_pre_hook(trust.before)
    optimizer.register_step_post_hook(trust.after)


class _TrustRatio:
    def __init__(self, coefficient: float, clip: bool, eps: float, exclude_1d: bool) -> None:
        self.coefficient = coefficient
        self.clip = clip
        self.eps = eps
        self.min_ndim = 2 if exclude_1d else 0
        self._decays: list[float] = []

    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            weights = [each for each in group["params"] if each.grad is not None and each.ndim >= self.min_ndim]
            if weights:
                self._scale(weights, [parameter.grad for parameter in weights], group["lr"], decay)
            if "weight_decay" in group:
                group["weight_decay"] = 0.0  # it is part of the gradient now

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = decay

    def _scale(self, weights: list[Tensor], gradients: list[Tensor], lr: float, decay: float) -> None:
        weight_norms = torch.stack(foreach("norm", weights))
        gradient_norms = torch.stack(foreach("norm", gradients))
        ratios = self.coefficient * weight_norms / (gradient_norms + decay * weight_norms + self.eps)
        if self.clip:
            ratios = (ratios / lr).clamp_(max=1)
        # With zero weights the gradient is not scaled; with a zero gradient nothing moves.
        ratios = torch.where(weight_norms == 0, 1.0, torch.where(gradient_norms == 0, 0.0, ratios))
        if decay:
            foreach("add_", gradients, weights, alpha=decay)
        foreach("mul_", gradients, list(ratios.unbind()))
