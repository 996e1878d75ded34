"""Copies of a model, its task and metrics for threads that evaluate side by side: they share the weights alone.

A forward pass may keep values on `self` or in a hook. Threads that called one model would mix up their batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from paceline.core.torch_private import is_compiled
from paceline.engine.stateful import CONTAINERS, KeptState, Parts
from paceline.metrics.metric import Metric
from paceline.tasks.task import Task

_STATELESS = {"paceline", "timm", "torch", "torchvision"}  # whose functions keep nothing between calls


class Replica(NamedTuple):
    """What a thread evaluates with, for one thread at a time."""

    model: nn.Module
    task: Task
    metrics: Sequence[Metric]
    parts: Parts


def keep_replica(replica: Replica) -> KeptState:
    """What a replica remembers beside its weights.

    It is restored before every batch, so that no metric depends on which batches a replica has seen before.
    """
    modules = [each for top in _modules(replica) for each in top.modules()]
    return KeptState(modules, replica.parts, owners=[*modules, replica.task])


def make_replicas(original: Replica, number: int) -> list[Replica]:
    """The original, and copies of it up to `number`; none if they would not be independent."""
    replicas = [original]
    if number == 1:
        return replicas
    modules = _modules(original)
    parts = [*(each for top in modules for each in top.modules()), original.task]
    has_shared = any(map(_is_shared, _functions(original.task, modules))) or any(map(_has_shared_container, parts))
    if is_compiled(original.model) or has_shared:
        return replicas
    try:
        for _ in range(number - 1):
            weights: dict[int, Any] = {id(each): each for module in modules for each in module.parameters()}
            replicas.append(copy.deepcopy(original, weights))
    except Exception:  # noqa: BLE001 - an attribute that cannot be copied, such as an open file or a tensor of a graph
        return replicas[:1]
    return replicas


def _modules(original: Replica) -> list[nn.Module]:
    """The model, and what else may have large weights: a teacher of the task, a network that a loss compares with."""
    losses = getattr(original.task, "loss_functions", {}).values()
    held = [value for each in (original.task, *losses) for value in getattr(each, "__dict__", {}).values()]
    return [original.model, *(each for each in (original.task, *losses, *held) if isinstance(each, nn.Module))]


def _functions(task: Task, modules: Sequence[nn.Module]) -> Iterator[Any]:
    """The hooks of all modules, and what is set on the task or on a module itself, such as its `forward`."""
    for owner in (task, *(each for top in modules for each in top.modules())):
        for value in getattr(owner, "__dict__", {}).values():
            yield value
            if isinstance(value, list | tuple | dict):
                yield from value.values() if isinstance(value, dict) else value


def _is_shared(function: Any) -> bool:
    """Whether a copy of the model would call this very function, and that may keep values: in a closure or a global."""
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType):
        return False
    return function.__closure__ is not None or function.__module__.partition(".")[0] not in _STATELESS


def _has_shared_container(part: object) -> bool:
    """Whether its class, a user's, has a list, dict or set, which all copies would share."""
    users = [each for each in type(part).__mro__[:-1] if each.__module__.partition(".")[0] not in _STATELESS]
    return any(type(value) in CONTAINERS for each in users for name, value in vars(each).items() if name[:1] != "_")
