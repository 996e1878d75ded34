"""What a pass may change beside gradients: buffers, attributes, and the state of losses and the task.

A forward pass may keep values on `self` or in a hook. Threads that called one model would mix up their batches, so
those that evaluate side by side have copies of the model, its task and metrics, which share the weights alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Stateful, Tree, flatten, unflatten
from paceline.core.torch_private import is_compiled
from paceline.core.world import World
from paceline.metrics.metric import Metric, pack, unpack
from paceline.tasks.task import Task

Parts = Mapping[str, Stateful]
CONTAINERS = (list, dict, set)
_OF_MODULES = vars(nn.Module()).keys()
_SKELETON = "~skeleton"  # no name of a tensor in a state: their tildes are followed by digits
_STATELESS = {"paceline", "timm", "torch", "torchvision"}  # whose functions keep nothing between calls


def copy_state(parts: Parts) -> Tree:
    """A copy of the current state of each part."""
    if not parts:
        return {}
    tensors, skeleton = flatten({name: part.state_dict() for name, part in parts.items()})
    return unflatten({name: tensor.clone() for name, tensor in tensors.items()}, skeleton)


def load_state(parts: Parts, state: Tree) -> None:
    """Load a copy of the state into each part that it knows, on the devices of its current tensors."""
    for name, part in parts.items():
        if name in state:
            now, _ = flatten(part.state_dict())
            tensors, skeleton = flatten(state[name])
            copies = {key: _copied(tensor, now.get(key)) for key, tensor in tensors.items()}
            part.load_state_dict(unflatten(copies, skeleton))


def buffers_of(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """The buffers that modules hold now: where each is kept, and its name."""
    return [
        (module._buffers, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


class KeptState:
    """The buffers of modules, and the state of losses and the task, as they are now: for passes that do not count.

    With `owners`, also their attributes, and what is one level inside those that are lists, dicts and sets. As a
    context, it restores everything at its end.
    """

    def __init__(self, modules: Iterable[nn.Module], parts: Parts, owners: Iterable[object] = ()) -> None:
        self._parts, self._state = parts, copy_state(parts)
        self._buffers = [(owner, name, buffer, buffer.clone()) for owner, name, buffer in buffers_of(modules)]
        own = [vars(each) for each in owners if hasattr(each, "__dict__")]
        self._attributes = [(held, {key: held[key] for key in held.keys() - _OF_MODULES}) for held in own]
        values = [value for _, before in self._attributes for value in before.values()]
        self._containers = [(value, copy.copy(value)) for value in values if type(value) in CONTAINERS]

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Make everything as it was."""
        for held, before in self._attributes:
            for key in held.keys() - _OF_MODULES - before.keys():
                del held[key]
            held.update(before)
        for container, content in self._containers:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for owner, name, buffer, value in self._buffers:
            buffer.copy_(value)
            owner[name] = buffer  # a forward pass may have put another tensor in its place
        load_state(self._parts, self._state)

    def restore_where(self, is_skipped: Tensor) -> None:
        """The same where a scalar is 1; decided on the device, but for losses and tasks that have a state."""
        if self._buffers:
            chosen = is_skipped > 0
            for _, _, buffer, value in self._buffers:
                torch.where(chosen, value, buffer, out=buffer)
        if self._parts and is_skipped:
            load_state(self._parts, self._state)


def share_state(parts: Parts, world: World) -> None:
    """Broadcast the state of rank 0."""
    if world.size == 1 or not parts:
        return
    tensors, skeleton = flatten({name: part.state_dict() for name, part in parts.items()})
    text = torch.frombuffer(bytearray(json.dumps(skeleton).encode()), dtype=torch.uint8)
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    sent = pack({**copies, _SKELETON: text})
    received = unpack(world.broadcast(sent))
    if not world.is_main:
        written = json.loads(received.pop(_SKELETON).numpy().tobytes())
        load_state(parts, unflatten(received, written))


def _copied(tensor: Tensor, now: Tensor | None) -> Tensor:
    return tensor.clone() if now is None else tensor.to(now.device, copy=True)


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
