"""Buffers that a forward pass changes, and how a second pass over the same inputs leaves them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_KNOWN_LIBRARIES = ("torch", "timm", "torchvision")


class _Saved(NamedTuple):
    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor

    def has_changed(self) -> bool:
        return self.module._buffers[self.name] is not self.buffer or self.buffer._version != self.version


class ChangedBuffers:
    """The buffers of some modules as they are now, before a pass that is going to be repeated.

    A buffer that the pass changes (the vector of spectral norm, a counter) is for the second pass what it was for the
    first, and after it what it has become since. Statistics of norm layers are not wound back for it: in training they
    have no part in the outputs. The second pass runs inside it as a context.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = [each for module in modules for each in module.modules() if each._buffers]
        self._norms = [each for each in owners if _only_tracks(each)]
        self._before = [
            _Saved(module, name, buffer, buffer._version, buffer.clone())
            for module in owners
            if not _only_tracks(module)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._replaced: list[tuple[nn.Module, str, Tensor | None]] = []

    def settle(self) -> None:
        """The first pass is over: keep only what it has changed."""
        self._before = [saved for saved in self._before if saved.has_changed()]

    def __enter__(self) -> None:
        """A second pass begins: it gets copies, so that no buffer is changed, nor any tensor that a graph may hold."""
        statistics = [
            (norm, name, buffer, buffer)
            for norm in self._norms
            if norm.training
            for name, buffer in norm._buffers.items()
            if buffer is not None
        ]
        others = [(each.module, each.name, each.module._buffers[each.name], each.value) for each in self._before]
        self._replaced = [(module, name, buffer) for module, name, buffer, _ in (*statistics, *others)]
        for module, name, _, value in (*statistics, *others):
            module._buffers[name] = value.clone()

    def __exit__(self, *error: object) -> None:
        """It is over: the buffers are back."""
        for module, name, buffer in self._replaced:
            module._buffers[name] = buffer
        self._replaced = []


def _only_tracks(module: nn.Module) -> bool:
    # A user's own norm layer may do more with its buffers than to track statistics.
    return isinstance(module, _NormBase) and type(module).__module__.partition(".")[0] in _KNOWN_LIBRARIES


@contextmanager
def copies_of_buffers(model: nn.Module) -> Iterator[None]:
    """Lend the model copies of its buffers: what happens to them inside is forgotten."""
    own = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    try:
        for module, name, buffer in own:
            module._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer
