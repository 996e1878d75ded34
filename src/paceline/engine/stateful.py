"""The state of losses and the task between steps: copied, restored, and shared among ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Stateful, Tree, flatten, unflatten
from paceline.core.world import World
from paceline.metrics.metric import pack, unpack

Parts = Mapping[str, Stateful]
_SKELETON = "~skeleton"  # no name of a tensor in a state: their tildes are followed by digits


def copy_state(parts: Parts) -> Tree:
    """A copy of the current state of each part."""
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


@contextmanager
def unchanged_state(parts: Parts) -> Iterator[None]:
    """A context for passes that do not count: the state of all parts is restored."""
    before = copy_state(parts)
    try:
        yield
    finally:
        load_state(parts, before)


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


class FirstState:
    """Each micro-batch starts from the state before the step; the state after the first one is kept.

    So it does not matter which process computes which micro-batch.
    """

    def __init__(self) -> None:
        self._before: Tree = None
        self._first: Tree = None

    @contextmanager
    def of_one(self, parts: Parts, counts: bool) -> Iterator[None]:
        """A context for the passes of one micro-batch of this rank."""
        if self._before is None:
            self._before = copy_state(parts)
        else:
            load_state(parts, self._before)
        yield
        if counts and self._first is None:
            self._first = copy_state(parts)

    def finish(self, parts: Parts, world: World) -> None:
        """Call after the last micro-batch, on all ranks."""
        load_state(parts, self._first or self._before or {})
        share_state(parts, world)
        self._before = self._first = None


def _copied(tensor: Tensor, now: Tensor | None) -> Tensor:
    return tensor.clone() if now is None else tensor.to(now.device, copy=True)


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers (BatchNorm's running statistics) afterwards."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in saved:
            buffer.copy_(value)
            setattr(module, name, buffer)  # a forward pass may have put another tensor in its place
