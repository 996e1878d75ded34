"""Modules that drop their activations and recompute them in the backward pass; buffers change only once."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paceline.engine.activation_checkpointing.blocks import Block

_aten = torch.ops.aten
_PRODUCTS = [
    _aten.convolution.default,
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


class CheckpointedModule(nn.Module):
    """A base class that is put before a module's own: the whole module is checkpointed."""

    is_checkpointed = True
    _block_name: str
    _keeps_products: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own outputs."""
        plain = super().forward
        if not _is_needed(self):
            return plain(*args, **kwargs)
        return _call_checkpointed(plain, [self], self._block_name, self._keeps_products, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(super().__reduce_ex__(protocol), self, CheckpointedModule)


class CheckpointedRuns(nn.Sequential):
    """A base class that is put before a sequence's own: runs of its children are checkpointed, each as one piece."""

    is_checkpointed = True
    _runs: dict[str, tuple[str, tuple[str, ...]]]
    """The name of the run that begins with a child, and its children."""
    _keeps_products: bool

    def forward(self, input: Any) -> Any:  # noqa: A002 - as in torch
        """The sequence's own output."""
        runs = self.__dict__.get("_runs", {})  # a slice of the sequence has none
        if not runs or not _is_needed(self):
            return super().forward(input)  # type: ignore[no-untyped-call]
        in_runs = {child for _, children in runs.values() for child in children}
        for key, child in self._modules.items():
            if key in runs:
                name, children = runs[key]
                members = [self.get_submodule(each) for each in children]
                call = partial(_in_turn, members)
                input = _call_checkpointed(call, members, name, self._keeps_products, (input,), {})  # noqa: A001
            elif key not in in_runs:
                input = child(input)  # noqa: A001
        return input

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(super().__reduce_ex__(protocol), self, CheckpointedRuns)


def checkpoint_block(block: Block, keeps_products: bool = False) -> None:
    """Have every backward pass recompute the block; with `keeps_products`, outputs of products are kept."""
    owner: Any = block.owner
    kind: type[nn.Module] = CheckpointedRuns if block.children else CheckpointedModule
    if not isinstance(owner, kind):
        owner.__class__ = _under(kind, type(owner))
    owner._keeps_products = keeps_products
    if block.children:
        owner._runs = {**owner.__dict__.get("_runs", {}), block.children[0]: (block.name, block.children)}
    else:
        owner._block_name = block.name


def _call_checkpointed(
    function: Callable[..., Any],
    modules: Sequence[nn.Module],
    name: str,
    keeps_products: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if torch.compiler.is_compiling():  # the compiler sets buffers once, whatever it computes twice
        selective: dict[str, Any] = {"context_fn": _keeping_products} if keeps_products else {}
        return checkpoint(function, *args, use_reentrant=False, **selective, **kwargs)
    buffers = ChangedBuffers(modules)
    # Lists and dicts are copied: their owner may put more into them before the backward pass.
    args, kwargs = tree_map(lambda each: each, (args, kwargs))
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    versions = [each._version for each in inputs]
    contexts = partial(_contexts, buffers, keeps_products)
    outputs = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    buffers.keep_changed()
    if versions != [each._version for each in inputs]:
        raise ValueError(
            f"checkpointing: {name} changes its input in place, so it cannot be recomputed from it;"
            " leave it out by naming other modules with match, or make its first operation not in place"
        )
    return outputs


_keeping_products = partial(create_selective_checkpoint_contexts, _PRODUCTS)


class _Both:
    """Two contexts as one that can be entered again, for graphs that are retained."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer = outer
        self.inner = inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self.inner.__exit__(*error)
        finally:
            self.outer.__exit__(*error)


def _contexts(buffers: ChangedBuffers, keeps_products: bool) -> tuple[Any, Any]:
    """The contexts of the first pass and of every later one."""
    if not keeps_products:
        return nullcontext(), buffers
    first, later = _keeping_products()
    return first, _Both(buffers, later)


def _in_turn(members: Sequence[nn.Module], value: Any) -> Any:
    for member in members:
        value = member(value)
    return value


def _is_needed(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


_made: dict[tuple[type, type], type[nn.Module]] = {}


def _under(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """The class `own` with `kind` before it, under its own name; the same one each time."""
    if (kind, own) not in _made:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _made[kind, own] = type(own.__name__, (kind, own), names)
    return _made[kind, own]


def _reduced(reduced: Any, module: nn.Module, kind: type[nn.Module]) -> Any:
    """A pickle finds classes by name, so it gets the module's own class, and `kind` to put before it again."""
    make, (made, *rest), *state = reduced
    if make is not copyreg.__newobj__ or made is not type(module) or made.__bases__[0] is not kind:  # type: ignore[attr-defined]
        return reduced
    return (_made_again, (kind, made.__bases__[1], *rest), *state)


def _made_again(kind: type[nn.Module], own: type[nn.Module], *rest: Any) -> nn.Module:
    made = _under(kind, own)
    return made.__new__(made, *rest)


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
    """The current buffers of some modules, before a pass that will be repeated.

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

    def keep_changed(self) -> None:
        """After the first pass: keep only the buffers that it changed."""
        self._before = [saved for saved in self._before if saved.has_changed()]

    def __enter__(self) -> None:
        """Before a second pass: it gets copies, so that neither buffers nor tensors held by a graph change."""
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
        """After it: restore the buffers."""
        for module, name, buffer in self._replaced:
            module._buffers[name] = buffer
        self._replaced = []


def _only_tracks(module: nn.Module) -> bool:
    # A user's own norm layer may do more with its buffers than to track statistics.
    return isinstance(module, _NormBase) and type(module).__module__.partition(".")[0] in _KNOWN_LIBRARIES
