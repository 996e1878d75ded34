"""All private names of torch that Paceline uses, and what for.

Each was tested with torch 2.13; the versions that `pyproject.toml` allows have it. The `_parameters`, `_buffers` and
`_modules` of nn.Module, on which many libraries rely, may be used anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

# What plans need of fake tensors; `import torch` has loaded these modules already.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
from torch._subclasses.fake_tensor import UnsupportedMutationAliasingException as UnsupportedMutationAliasingException
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

# torch's own walk through nested values knows what users register, such as the outputs of other libraries.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

MODULE_APPLY, TRUNC_NORMAL = "_apply", "_no_grad_trunc_normal_"
"""What a plan replaces: how a module moves its tensors, and how a distribution is cut off."""


def foreach(name: str, tensors: list[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """A method of each tensor by one kernel for all; lists hold an argument for each."""
    return list(getattr(torch, f"_foreach_{name}")(tensors, *arguments, **options) or ())


def version_of(tensor: Tensor) -> int:
    """A number that every change in place raises."""
    return tensor._version


def compile_call(module: nn.Module) -> None:
    """Compile the module on first call; `module.compile()` does nothing for a plain nn.Sequential."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module are compiled."""
    return module._compiled_call_impl is not None


def saved_buffers(module: nn.Module) -> set[str]:
    """The names of the module's own buffers that are in its state dict."""
    return {name for name, _ in module.named_buffers(recurse=False)} - module._non_persistent_buffers_set


def default_store() -> dist.Store:  # type: ignore[name-defined]
    """The store of the process group."""
    return dist.distributed_c10d._get_default_store()


def num_collectives() -> int:
    """The number of collectives of this process, torch's own included."""
    group: Any = dist.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())


def shut_down_workers(iterator: Iterator[Any]) -> None:
    """End the workers of a DataLoader's iterator now; otherwise they end when it is collected."""
    getattr(iterator, "_shutdown_workers", lambda: None)()  # without workers it has none to end


def operator(name: str) -> Any:
    """An operator of ATen whose name is private."""
    return getattr(torch.ops.aten, name).default


def returns_nothing(operator: Any) -> bool:
    """Whether an operator only writes into its arguments."""
    return not operator._schema.returns


def is_in_backward() -> bool:
    """Whether autograd runs a backward pass now."""
    return torch._C._current_graph_task_id() != -1


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of a storage. Python may make several objects for one."""
    return int(storage._cdata)


def fake_store() -> dist.Store:  # type: ignore[name-defined]
    """The store of a process group whose other processes are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
