"""Steps that an optimizer skips on the device: where `found_inf` is 1, weights and optimizer state stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def skip_on_inf(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Have the optimizer skip each step at which `found_inf`, a scalar on its device, is 1.

    torch's fused optimizers look at it in their kernels. For all others a copy of weights and state is kept during the
    step, and selected on the device. Where an optimizer counts its steps on the host, the host reads `found_inf`.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        return
    guard = _StepGuard(found_inf)
    optimizer.register_step_pre_hook(guard.before)
    optimizer.register_step_post_hook(guard.after)


class _StepGuard:
    """Undoes a step of an optimizer that does not know `found_inf`."""

    def __init__(self, found_inf: Tensor) -> None:
        self._found_inf = found_inf
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._groups: list[dict[str, Any]] = []
        self._states: dict[Tensor, Any] = {}

    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        changing = _on_device(optimizer)
        if changing is None:
            changing = []
            if not (1 - self._found_inf).item():
                changing = [_local(parameter) for parameter in _trained(optimizer)]
                self._states = {each: deepcopy(optimizer.state.get(each)) for each in _trained(optimizer)}
                self._groups = [_numbers(group) for group in optimizer.param_groups]
        self._copies = [(tensor, tensor.clone()) for tensor in changing]

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        is_skipped = self._found_inf > 0
        for tensor, copy in self._copies:
            torch.where(is_skipped, copy, tensor, out=tensor)
        for parameter, state in self._states.items():
            optimizer.state.pop(parameter, None)
            if state is not None:
                optimizer.state[parameter] = state
        for group, numbers in zip(optimizer.param_groups, self._groups, strict=False):
            for name in set(_numbers(group)) - set(numbers):  # begun by this step
                del group[name]
            group.update(numbers)
        self._copies, self._states, self._groups = [], {}, []


def _on_device(optimizer: Optimizer) -> list[Tensor] | None:
    """This rank's part of each tensor that a step changes; None if the host counts steps, or state is still new."""
    found: list[Tensor] = []
    if any("step" in group for group in optimizer.param_groups):
        return None
    for parameter in _trained(optimizer):
        state = optimizer.state.get(parameter)
        if state is None or any(_is_on_host(value, parameter) for value in state.values()):
            return None
        found += [_local(each) for each in (parameter, *state.values()) if isinstance(each, Tensor)]
    return found


def _is_on_host(value: Any, parameter: Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.device != parameter.device
    return value is not None  # a number, or a list of what cannot be known here


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return local


def _trained(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: deepcopy(value) for key, value in group.items() if isinstance(value, int | float | Tensor)}
