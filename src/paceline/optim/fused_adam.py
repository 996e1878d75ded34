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
            for number, group in enumerate(self.param_groups):
                if parameters := [each for each in group["params"] if each.grad is not None]:
                    self._update(number, group, parameters)
        return loss

    def _update(self, number: int, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[each] for each in parameters]
        if not all(states):
            self._init_group(group, *([] for _ in range(6)))  # type: ignore[no-untyped-call]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        counters: dict[int, _StepCounter] = self.__dict__.setdefault("_counters", {})  # copies start without
        counter = counters.get(number)
        if counter is None or not counter.counts(states):
            counter = counters[number] = _StepCounter(states)
        steps = counter.count_step()
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


class _StepCounter:
    """The step counts of parameters, as views of one tensor: torch adds to them one by one."""

    def __init__(self, states: list[dict[str, Any]]) -> None:
        self._together = torch.stack([state["step"] for state in states])
        self._steps = list(self._together.unbind())
        for state, step in zip(states, self._steps, strict=True):
            state["step"] = step

    def counts(self, states: list[dict[str, Any]]) -> bool:
        """Whether its views, all of them and in this order, are the step counts of these states."""
        return len(states) == len(self._steps) and all(
            state["step"] is step for state, step in zip(states, self._steps, strict=True)
        )

    def count_step(self) -> list[Tensor]:
        """The step counts, one higher."""
        self._together += 1
        return self._steps


class AdamW(Adam, torch.optim.AdamW):
    """The same for AdamW."""
