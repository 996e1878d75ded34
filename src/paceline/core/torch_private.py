"""All private names of torch that Paceline uses: what for, and what happens in a torch without them.

Each was tested with torch 2.13, and the wheels of 2.11, 2.12, 2.14 and 2.15 have it. Without one, a run is slower or a
guard is missing; only plans need fake tensors. The `_parameters`, `_buffers` and `_modules` of nn.Module, on which many
libraries rely, may be used anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.utils
from torch import Tensor, nn
from torch import distributed as dist

from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
    from torch._subclasses.fake_tensor import (
        UnsupportedMutationAliasingException as UnsupportedMutationAliasingException,
    )
    from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def foreach(name: str, tensors: list[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """A method of each tensor by one kernel for all, or else one by one; lists hold an argument for each."""
    if kernel := getattr(torch, f"_foreach_{name}", None):
        return list(kernel(tensors, *arguments, **options) or ())
    columns = [each if isinstance(each, list) else [each] * len(tensors) for each in arguments]
    return [getattr(tensor, name)(*own, **options) for tensor, *own in zip(tensors, *columns, strict=True)]


def version_of(tensor: Tensor) -> int | None:
    """A number that every change in place raises; None if torch does not tell."""
    return getattr(tensor, "_version", None)


def is_unchanged(tensor: Tensor, version: int | None) -> bool:
    """Whether the tensor certainly has the values that it had at this version."""
    return version is not None and version_of(tensor) == version


# torch's own walk through nested values knows what users register, such as the outputs of other libraries.


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts."""
    if pytree := getattr(torch.utils, "_pytree", None):
        leaves: list[Any] = pytree.tree_leaves(tree)
        return leaves
    return list(_leaves(tree))


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """New lists, tuples and dicts with the function's result for each leaf."""
    if pytree := getattr(torch.utils, "_pytree", None):
        return pytree.tree_map(function, tree)
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        made = [tree_map(function, value) for value in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return function(tree)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(value)
    else:
        yield tree


def compile_call(module: nn.Module) -> None:
    """Compile the module on first call. `module.compile()`, the fallback, does nothing for a plain nn.Sequential."""
    if not (hasattr(module, "_call_impl") and hasattr(module, "_compiled_call_impl")):
        module.compile()
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module are compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None


def saved_buffers(module: nn.Module) -> set[str]:
    """The names of the module's own buffers that are in its state dict; all of them if torch does not tell."""
    return {name for name, _ in module.named_buffers(recurse=False)} - getattr(
        module, "_non_persistent_buffers_set", set()
    )


def default_store() -> dist.Store | None:  # type: ignore[name-defined]
    """The store of the process group; without it, who leaves does not wait for the others."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return find and find()


def num_collectives() -> int:
    """The number of collectives of this process, torch's own included; 0 if torch does not tell."""
    group = getattr(dist.distributed_c10d, "_get_default_group", lambda: None)()
    number: int = getattr(group, "_get_sequence_number_for_group", lambda: 0)()
    return number


def loader_workers(iterator: Iterator[Any]) -> list[Any]:
    """The worker processes of a DataLoader's iterator; without them, a dead one is not named."""
    return getattr(iterator, "_workers", [])


def shut_down_workers(iterator: Iterator[Any]) -> None:
    """End the workers of a DataLoader's iterator now; otherwise they end when it is collected."""
    getattr(iterator, "_shutdown_workers", lambda: None)()


# What plans need: operators, fake tensors, and where a tensor is made.


def operator(name: str) -> Any:
    """An operator of ATen whose name is private; None without it, so that nothing is recognized as it."""
    packet = getattr(torch.ops.aten, name, None)
    return packet and packet.default


def returns_nothing(operator: Any) -> bool:
    """Whether an operator only writes into its arguments; if torch does not tell, none does."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and not schema.returns


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values; if torch does not tell, all have."""
    fake = getattr(torch, "_subclasses", None)
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass now; if torch does not tell, its memory counts as that of activations."""
    task: int = getattr(torch._C, "_current_graph_task_id", lambda: -1)()
    return task != -1


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of a storage. Python may make several objects for one."""
    key: int = getattr(storage, "_cdata", id(storage))
    return key


# What a plan replaces, if it is there: how a module moves its tensors, and how a distribution is cut off.
MODULE_APPLY, TRUNC_NORMAL = "_apply", "_no_grad_trunc_normal_"

_FAKE, _FAKE_STORE = "torch._subclasses.fake_tensor", "torch.testing._internal.distributed.fake_pg"
_MODULES = {"FakeStore": _FAKE_STORE, "TorchDispatchMode": "torch.utils._python_dispatch"} | dict.fromkeys(
    (
        *("FakeTensor", "FakeTensorMode", "unset_fake_temporarily", "DataDependentOutputException"),
        *("DynamicOutputShapeException", "UnsupportedFakeTensorException", "UnsupportedMutationAliasingException"),
        "UnsupportedOperatorException",
    ),
    _FAKE,
)


def __getattr__(name: str) -> Any:
    """What fake tensors consist of, imported when a plan first asks for it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except (ImportError, AttributeError):
        message = f"torch {torch.__version__} has no {name}, which plans need; install a torch from 2.10 to 2.13"
        raise PacelineError(message) from None
