"""What a pass may change beside gradients: buffers, and the state of losses and the task."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Stateful, Tree, flatten, unflatten
from paceline.core.world import World
from paceline.metrics.metric import pack, unpack

Parts = Mapping[str, Stateful]
CONTAINERS = (list, dict, set)
_OF_MODULES = vars(nn.Module()).keys()
_SKELETON = "~skeleton"  # no name of a tensor in a state: their tildes are followed by digits


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
