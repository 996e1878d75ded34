"""How much memory tensors take, and what for: every storage is counted from its first use until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.torch_private import TorchDispatchMode, is_in_backward, storage_key, tree_leaves

Category = Literal["parameters", "gradients", "optimizer", "activations", "temporaries", "communication"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
_KEPT: tuple[Category, ...] = ("parameters", "gradients", "optimizer")
Timeline = NDArray[np.int64]
"""Bytes by moment and category."""
_COMMUNICATION = frozenset({"c10d", "fsdp", "_c10d_functional"})  # namespaces of operators that exchange tensors


@dataclass(frozen=True)
class Memory:
    """The bytes of tensors at the moment when they are most, by what they are for."""

    parts: Mapping[Category, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are alive, of fake tensors as of real ones.

    What a forward pass makes are activations; what a backward pass or the optimizer makes are temporaries, unless it
    becomes a gradient or optimizer state.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[int, Category]] = {}
        self._exchanged: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._timeline = [tuple(self._live.values())]
        self.peak_passing = 0
        """The most bytes of activations, temporaries and communication that were alive, since `reset_peak`."""
        self.phase: Category = "parameters"
        """What storages are for that a forward pass, or the code around it, makes from now on."""

    @property
    def peak(self) -> Memory:
        """What was alive when it was most, since `reset_peak`."""
        return Memory(dict(zip(CATEGORIES, max(self._timeline, key=sum), strict=True)))

    @property
    def timeline(self) -> Timeline:
        """What was alive, by category, each time that it became more or changed its category, since `reset_peak`."""
        return np.array(self._timeline, np.int64)

    @property
    def live(self) -> int:
        """The bytes that are alive now."""
        return self._total

    @property
    def passing(self) -> int:
        """The bytes that are alive now of what does not stay from step to step."""
        return self._total - sum(self._live[part] for part in _KEPT)

    def reset_peak(self) -> None:
        """Forget what was alive before."""
        self._follow_sizes()
        self._timeline, self.peak_passing = [tuple(self._live.values())], self.passing

    def add(self, tensors: Iterable[Any], category: Category) -> None:
        """Count these tensors, or count them as something else than before."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for storage in _storages(tensor):
                    self._count(storage, category, move=True)

    @contextmanager
    def watch(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Surrounds steps of training: gradients and optimizer state are recognized."""
        self.add([*model.parameters(), *model.buffers()], "parameters")
        self.add(_parameters(optimizer), "parameters")
        self._add_state(optimizer)
        handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._add_gradient)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        handles += [
            optimizer.register_step_pre_hook(lambda *_: self._begin_step(optimizer)),
            optimizer.register_step_post_hook(lambda *_: self._end_step(optimizer)),
        ]
        self.phase = "activations"
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count the storages that it makes."""
        made = func(*args, **(kwargs or {}))
        is_backward = is_in_backward()
        category: Category = "temporaries" if is_backward and self.phase == "activations" else self.phase
        is_collective = func.namespace in _COMMUNICATION
        if is_collective or func is torch.ops.aten.empty.memory_format:  # FSDP frees before it allocates
            self._follow_sizes()
        if is_collective and self.phase != "parameters":
            passing = (each for each in tree_leaves((args, kwargs, made)) if not self._is_kept(each))
            self.add(passing, "communication")
            return made
        for tensor in (made,) if isinstance(made, Tensor) else tree_leaves(made):
            if isinstance(tensor, Tensor):
                for storage in _storages(tensor):
                    self._count(storage, category)
        return made

    def _add_gradient(self, parameter: Tensor) -> None:
        self.add([parameter.grad], "gradients")

    def _is_kept(self, value: Any) -> bool:
        """Whether a tensor stays from pass to pass, so that what is exchanged is a copy of it."""
        storages = _storages(value) if isinstance(value, Tensor) else ()
        return any(self._storages.get(storage_key(each), (0, "temporaries"))[1] in _KEPT for each in storages)

    def _begin_step(self, optimizer: Optimizer) -> None:
        self.add((each.grad for each in _parameters(optimizer)), "gradients")
        self.phase = "temporaries"

    def _end_step(self, optimizer: Optimizer) -> None:
        self._add_state(optimizer)
        self.phase = "activations"

    def _add_state(self, optimizer: Optimizer) -> None:
        self.add((value for state in optimizer.state.values() for value in tree_leaves(state)), "optimizer")

    def _count(self, storage: torch.UntypedStorage, category: Category, move: bool = False) -> None:
        key = storage_key(storage)
        known = self._storages.get(key)
        if known is None:
            size = storage.nbytes()
            weakref.finalize(storage, self._free, key)
            self._total += size
        elif move and known[1] != category:
            size = known[0]
            self._live[known[1]] -= size
        else:
            return
        self._storages[key] = (size, category)
        if category == "communication":
            self._exchanged[key] = weakref.ref(storage)
        self._live[category] += size
        self._note()

    def _follow_sizes(self) -> None:
        """Count what is exchanged by the size that it has now: FSDP empties storages, and fills them again."""
        before = self._total
        for key, reference in self._exchanged.items():
            storage, (size, category) = reference(), self._storages[key]
            more = storage.nbytes() - size if storage is not None else 0
            if more:
                self._storages[key] = (size + more, category)
                self._live[category] += more
                self._total += more
        if self._total > before:
            self._note()

    def _note(self) -> None:
        """Remember what is alive now."""
        self._timeline.append(tuple(self._live.values()))
        self.peak_passing = max(self.peak_passing, self.passing)

    def _free(self, key: int) -> None:
        size, category = self._storages.pop(key)
        self._exchanged.pop(key, None)
        self._live[category] -= size
        self._total -= size


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory behind a tensor; of one that is kept in parts, that of this process."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.layout is torch.strided:
        yield local.untyped_storage()


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
