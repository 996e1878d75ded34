"""Adam and AdamW on a CPU: torch's fused kernels, called without what torch does around them.

That takes as long as the update of a small model: it sorts tensors by device and type, and looks for what a recipe
cannot ask for. The classes have the names of torch's, which checkpoints hold: state moves between a CPU and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Adam(torch.optim.Adam):
    """torch's Adam with the same state and bit-identical updates."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                if parameters := [each for each in group["params"] if each.grad is not None]:
                    self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[each] for each in parameters]
        if not all(states):
            self._init_group(group, *([] for _ in range(6)))  # type: ignore[no-untyped-call]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        steps = _count_step(states)
        beta1, beta2 = group["betas"]
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        kernel(
            parameters,
            [each.grad for each in parameters],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
        )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))


def _count_step(states: list[dict[str, Any]]) -> list[Tensor]:
    """The step counts of parameters, one higher: views of one tensor, since torch adds to them one by one."""
    steps = [state["step"] for state in states]
    together = steps[0]._base
    if together is None or not _are_all_of(together, steps):
        together = torch.stack(steps)
        steps = [together[place] for place in range(len(steps))]
        for state, step in zip(states, steps, strict=True):
            state["step"] = step
    together += 1
    return steps


def _are_all_of(together: Tensor, steps: list[Tensor]) -> bool:
    return together.shape == (len(steps),) and all(
        step._base is together and step.storage_offset() == place for place, step in enumerate(steps)
    )


class AdamW(Adam, torch.optim.AdamW):
    """The same for AdamW."""
