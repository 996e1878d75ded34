"""Bytes of the tensors that are alive, counted on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make inside it, until the last tensor on them is gone.

    What is given to `own`, say parameters, gradients and optimizer state, is counted apart.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owned = 0
        """Bytes of what was given to `own` and is alive."""
        self.other = 0
        """Bytes of everything else that is alive."""
        self.peak_other = 0
        self.peak_total = 0
        self._sizes: dict[int, int] = {}
        self._owned: set[int] = set()

    def own(self, tensors: Iterable[Tensor]) -> None:
        """Count these apart from now on."""
        for tensor in tensors:
            key = self._notice(tensor)
            if key not in self._owned:
                self._owned.add(key)
                self.owned += self._sizes[key]
                self.other -= self._sizes[key]
        self._mark()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                self._notice(output)
        self._mark()
        return outputs

    def _notice(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)  # one object for one storage, for as long as anything holds the storage
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.other += self._sizes[key]
            weakref.finalize(storage, self._forget, key)
        return key

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._owned:
            self._owned.remove(key)
            self.owned -= size
        else:
            self.other -= size

    def _mark(self) -> None:
        self.peak_other = max(self.peak_other, self.other)
        self.peak_total = max(self.peak_total, self.other + self.owned)


def own_training_state(live: LiveBytes, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Count parameters, buffers, optimizer state and, as soon as they are there, gradients apart."""

    def own_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        live.own([parameter.grad])

    live.own([*model.parameters(), *model.buffers()])
    live.own(value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(own_gradient)  # type: ignore[no-untyped-call]
