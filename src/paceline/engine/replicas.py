"""Copies of a model and its task for threads that evaluate side by side: shared weights, everything else their own.

A forward pass may keep values on `self` or in a hook. Threads that called one model would mix up their batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from paceline.tasks.task import Task

_STATELESS = {"paceline", "timm", "torch", "torchvision"}  # whose functions keep nothing between calls


class Replica(NamedTuple):
    """A model and its task, for one thread at a time."""

    model: nn.Module
    task: Task


def make_replicas(model: nn.Module, task: Task, number: int) -> list[Replica]:
    """The model with its task, and copies of both up to `number`; none if they would not be independent."""
    replicas = [Replica(model, task)]
    if number == 1 or model._compiled_call_impl is not None or any(map(_is_shared, _functions(model))):
        return replicas
    try:
        for _ in range(number - 1):
            weights: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
            replicas.append(copy.deepcopy(Replica(model, task), weights))
    except Exception:  # noqa: BLE001 - an attribute that cannot be copied, such as an open file or a tensor of a graph
        return replicas[:1]
    return replicas


def _functions(model: nn.Module) -> Iterator[Any]:
    """The hooks of all modules, and what is set on a module itself, such as its `forward`."""
    for module in model.modules():
        yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *vars(module).values())


def _is_shared(function: Any) -> bool:
    """Whether a copy of the model would call this very function, and that may keep values: in a closure or a global."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType):
        return False
    return function.__closure__ is not None or function.__module__.partition(".")[0] not in _STATELESS
