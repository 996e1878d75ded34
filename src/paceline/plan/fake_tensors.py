"""Fake tensors: they have shapes, types and storages, but no memory and no values."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from paceline.core.errors import PacelineError
from paceline.core.torch_private import (
    MODULE_APPLY,
    TRUNC_NORMAL,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
    operator,
    returns_nothing,
    unset_fake_temporarily,
)
from paceline.core.user_code import described
from paceline.core.world import World
from paceline.engine.strategies import ddp, fsdp

_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedMutationAliasingException, UnsupportedOperatorException)
# What torch says, in plain RuntimeErrors, of tensors without memory and of operators without a kernel for them.
_WITHOUT_MEMORY = re.compile(
    r"tensor subclasses|fake ?tensor|unallocated storage|\bmeta\b|Could not run 'aten::", re.IGNORECASE
)


@contextmanager
def fake_tensors(processes: int = 1) -> Iterator[FakeTensorMode]:
    """Inside, whatever makes a tensor makes a fake one; with several processes, this is the first of them."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(fake_process_group(processes) if processes > 1 else _leave_process_group())
        stack.enter_context(_replace(logging.getLogger(FakeTensorMode.__module__), "disabled", True))
        stack.enter_context(_replace(nn.Module, MODULE_APPLY, convert_module))
        stack.enter_context(_replace(nn.init, TRUNC_NORMAL, keep_unsampled))
        stack.enter_context(_replace(fsdp, "init_device_mesh", _make_device_mesh))
        stack.enter_context(_replace(ddp, "DistributedDataParallel", _FakeDDP))
        stack.enter_context(mode)
        stack.enter_context(_AssumedValues())  # type: ignore[no-untyped-call]
        yield mode


@contextmanager
def _replace(owner: Any, name: str, stand_in: object) -> Iterator[None]:
    """Inside, what a module or a class calls `name` is something else, if it has that."""
    if not hasattr(owner, name):
        yield
        return
    original = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, original)


class FakeWorld(World):
    """The first of several processes, the others of which are not there: nothing is exchanged."""

    def start_sum(self, numbers: list[float]) -> Callable[[], list[float]]:
        """The numbers of this process."""
        return lambda: numbers

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor of this process."""
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As if all had the same."""
        return [tensor] * self.size

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of this process."""
        return tensor

    def barrier(self) -> None:
        """Nobody to wait for."""


class _AssumedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives an answer where the host reads a value.

    A number is 1, every element that may be selected is, and what is asked of any element holds for none: such
    questions look for mistakes.

    An operator that returns nothing only writes into what it is given, so it is left out. Some of fused optimizers have
    no kernel for fake tensors: torch would make real ones of all parameters, gradients and state, and run on them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and returns_nothing(func):
            return None
        given = args[0] if args else None
        if func in _INDEXING:
            args = (given, _without_masks(args[1]), *args[2:])
        elif isinstance(given, FakeTensor):
            if func.overloadpacket is torch.ops.aten.any:
                asked = func(*args, **(kwargs or {}))
                asked.is_any = True
                return asked
            if func is _READ_NUMBER:
                if getattr(given, "is_any", False):
                    return False
                return 1.0 if given.is_floating_point() else given.dtype == torch.bool or 1
            answer = _selected(func, args)
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))


_READ_NUMBER = operator("_local_scalar_dense")
_INDEXING = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        operator("_index_put_impl_"),
    }
)


def _selected(func: Any, args: Sequence[Any]) -> Any:
    """What operators give that select elements by their values, if they select all; None of other operators."""
    given = args[0]
    if func is torch.ops.aten.nonzero.default:
        return given.new_empty((given.numel(), given.ndim), dtype=torch.int64)
    if func is torch.ops.aten.bincount.default:
        weights = args[1] if len(args) > 1 else None
        least = args[2] if len(args) > 2 else 0
        return given.new_empty(max(1, least), dtype=torch.int64 if weights is None else weights.dtype)
    if func is torch.ops.aten.masked_select.default:
        return given.new_empty(given.numel())
    if func is operator("_unique2"):  # all are equal, so what is done for each of them is done once
        return given.new_zeros(1), given.new_zeros(given.shape, dtype=torch.int64), given.new_zeros(1)
    if func.name() == "torchvision::nms":
        return given.new_empty(len(given), dtype=torch.int64)
    return None


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with each mask in place of the numbers of all of its elements."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
        else:
            found.append(index)
    return found


class _FakeDDP(nn.Module):
    """What DistributedDataParallel takes: buckets as large as the gradients, which stay from step to step."""

    def __init__(self, module: nn.Module, device_ids: Any = None, **options: Any) -> None:
        super().__init__()
        self.module = module
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buckets = [(parameter, torch.empty_like(parameter)) for parameter in learning]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; gradients are added up in their buckets."""
        for parameter, bucket in self._buckets:
            if parameter.grad is None:
                parameter.grad = bucket
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is exchanged anyway."""
        return nullcontext()

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Nothing is exchanged."""


@contextmanager
def fake_process_group(size: int) -> Iterator[None]:
    """Inside, this is the first of some processes, the others of which take everything and send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _leave_process_group() -> Iterator[None]:
    """Leaves the group of one process that a strategy may make inside, so that others can be made later."""
    was_there = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not was_there:
            dist.destroy_process_group()


def _make_device_mesh(*args: Any, **kwargs: Any) -> Any:
    """A mesh of real numbers: its own rank is looked up in it."""
    with unset_fake_temporarily():
        return init_device_mesh(*args, **kwargs)


def keep_unsampled(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What stands for sampling until all values are within bounds, which fake ones never are."""
    return tensor


def convert_module(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """What `nn.Module.to` and its like do, without exchanging the memory of tensors, which fake ones cannot."""
    for each in module.modules() if recurse else (module,):
        for name, parameter in each._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    made = convert(parameter)
                if made is not parameter:
                    each._parameters[name] = nn.Parameter(made, parameter.requires_grad)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = convert(buffer)
    return module


def limit_of_fake_tensors(error: BaseException) -> str | None:
    """Why fake tensors cannot follow a step that raised this; None if they can and something else is wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _VALUES) or (isinstance(cause, ZeroDivisionError) and _is_in_optimizer(cause)):
            return f"{described(cause)} depends on values, which the fake tensors of a plan do not have"
        if isinstance(cause, _UNSUPPORTED) or (isinstance(cause, RuntimeError) and _WITHOUT_MEMORY.search(str(cause))):
            text = str(error) if isinstance(error, PacelineError) else described(cause)
            sentence = text.partition(". ")[0]  # torch goes on to list its backends
            return f"the fake tensors of a plan cannot follow this step: {sentence}"
        cause = cause.__cause__
    return None


def _is_in_optimizer(error: BaseException) -> bool:
    """A number that is read from a fake tensor of ones stays 1; NAdam divides by its distance from 1."""
    frames = [] if error.__traceback__ is None else traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/optim/" in frames[-1].filename
