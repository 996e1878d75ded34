"""Private names of torch stand in one file, and each can be missing."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.core import torch_private
from paceline.core.errors import PacelineError

SOURCE = Path(torch_private.__file__).parents[1]
# Of the standard library and others; of nn.Module, which many libraries use; torchvision's, which is replaced.
_ALLOWED = {
    *("_asdict", "_replace", "_fields", "_exit", "_getframe", "_config", "_style"),
    *("_parameters", "_buffers", "_modules"),
    "_assert_has_ops",
}


def private_names(tree: ast.AST) -> Iterator[str]:
    """The private names that a module imports from torch, or asks of something that is not itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = (getattr(node, "module", None) or "").split(".")
            for names in ([*module, *alias.name.split(".")] for alias in node.names):
                path = [name for name in names if name]
                if path[0] in ("torch", "torchvision"):
                    yield from (name for name in path if name.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr


def defined_names(tree: ast.AST) -> Iterator[str]:
    """What a module defines, or sets on its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_no_other_file_has_private_names_of_torch() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    own = _ALLOWED.union(*(defined_names(tree) for path, tree in trees.items() if path.name != "torch_private.py"))
    found = {path: sorted(set(private_names(tree)) - own) for path, tree in trees.items()}
    assert [path.name for path, names in found.items() if names] == ["torch_private.py"], found


def tensors() -> list[Tensor]:
    return [torch.arange(6.0).view(2, 3), torch.tensor([3.0, -4.0])]


def others() -> list[Tensor]:
    return [-3 * each + 1 for each in tensors()]


FOREACH: dict[str, list[Callable[[list[Tensor]], list[Tensor]]]] = {
    "norm": [lambda own: torch_private.foreach("norm", own)],
    "mul_": [
        lambda own: torch_private.foreach("mul_", own, 0.5),
        lambda own: torch_private.foreach("mul_", own, torch.tensor(0.3)),
        lambda own: torch_private.foreach("mul_", own, [torch.tensor(2.0), torch.tensor(3.0)]),
    ],
    "add_": [lambda own: torch_private.foreach("add_", own, others(), alpha=0.1)],
    "lerp_": [lambda own: torch_private.foreach("lerp_", own, others(), 0.3)],
    "copy_": [lambda own: torch_private.foreach("copy_", own, others())],
}


@pytest.mark.parametrize("name", FOREACH)
def test_one_kernel_for_each_tensor_does_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> Iterator[list[Tensor]]:
        for operation in FOREACH[name]:
            own = tensors()
            made = operation(own)
            yield made if name == "norm" else own

    expected = list(results())
    monkeypatch.delattr(torch, f"_foreach_{name}")
    torch.testing.assert_close(list(results()), expected, rtol=0, atol=0)
    assert name == "norm" or not torch.equal(expected[0][0], tensors()[0])


def test_a_tensor_without_a_version_may_have_changed() -> None:
    tensor = torch.zeros(2)
    version = torch_private.version_of(tensor)
    assert torch_private.is_unchanged(tensor, version)
    assert not torch_private.is_unchanged(tensor.add_(1), version)
    silent: Any = SimpleNamespace()
    assert torch_private.version_of(silent) is None
    assert not torch_private.is_unchanged(silent, None)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_nested_values_are_walked_without_pytree(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": [1, (2, Pair(3, {"b": 4}))], "c": ()}
    expected = torch_private.tree_leaves(tree), torch_private.tree_map(lambda leaf: leaf + 1, tree)
    assert expected == ([1, 2, 3, 4], {"a": [2, (3, Pair(4, {"b": 5}))], "c": ()})
    monkeypatch.delattr(torch.utils, "_pytree")
    assert (torch_private.tree_leaves(tree), torch_private.tree_map(lambda leaf: leaf + 1, tree)) == expected
    assert torch_private.tree_leaves(OrderedDict(b=1, a=2)) == [1, 2]


@pytest.mark.parametrize("name", ["_call_impl", "_compiled_call_impl"])
def test_a_module_is_compiled_by_its_own_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []

    def compile_itself(module: nn.Module) -> None:
        compiled.append(module)

    monkeypatch.setattr(nn.Module, "compile", compile_itself)
    module = nn.Linear(1, 1)
    assert not torch_private.is_compiled(module)
    torch_private.compile_call(nn.Linear(1, 1))
    assert compiled == []
    monkeypatch.delattr(nn.Module, name)
    torch_private.compile_call(module)
    assert compiled == [module]
    assert not torch_private.is_compiled(module)


def test_all_buffers_count_as_saved() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)
    saved = {"running_mean", "running_var", "num_batches_tracked"}
    assert torch_private.saved_buffers(module) == saved
    del module._non_persistent_buffers_set
    assert torch_private.saved_buffers(module) == {*saved, "unsaved"}


def test_a_process_group_has_a_store_and_counts_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        before = torch_private.num_collectives()
        dist.barrier()
        assert torch_private.num_collectives() > before
        store = torch_private.default_store()
        assert store is not None
        assert store.add("paceline", 1) == 1
        for name in ("_get_default_group", "_get_default_store"):
            monkeypatch.delattr(dist.distributed_c10d, name)
        assert (torch_private.num_collectives(), torch_private.default_store()) == (0, None)
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_a_group_that_counts_nothing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_default_group", SimpleNamespace)
        assert torch_private.num_collectives() == 0


def test_the_workers_of_a_loader_may_be_hidden() -> None:
    hidden: Any = iter(())
    assert torch_private.loader_workers(hidden) == []
    torch_private.shut_down_workers(hidden)
    with_names: Any = SimpleNamespace(_workers=[1], _shutdown_workers=lambda: ended.append(1))
    ended: list[int] = []
    torch_private.shut_down_workers(with_names)
    assert (torch_private.loader_workers(with_names), ended) == ([1], [1])


def test_operators_and_what_they_return() -> None:
    assert torch_private.operator("_local_scalar_dense") is torch.ops.aten._local_scalar_dense.default
    assert torch_private.operator("_no_such_operator") is None
    assert not torch_private.returns_nothing(torch.ops.aten.add.Tensor)
    assert torch_private.returns_nothing(torch.ops.aten._foreach_add_.Scalar)
    assert not torch_private.returns_nothing(SimpleNamespace())


def test_a_backward_pass_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append(torch_private.is_in_backward()))  # type: ignore[no-untyped-call]
    torch.autograd.backward(weight.sum())
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    torch.autograd.backward(weight.sum())
    assert (seen, torch_private.is_in_backward()) == ([True, False], False)


def test_a_storage_has_one_key() -> None:
    tensor = torch.zeros(3)
    assert torch_private.storage_key(tensor.untyped_storage()) == torch_private.storage_key(
        tensor[1:].untyped_storage()
    )
    silent: Any = SimpleNamespace()
    assert torch_private.storage_key(silent) == id(silent)


@pytest.mark.parametrize("name", torch_private._MODULES)
def test_a_plan_says_that_it_needs_another_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(getattr(torch_private, name), type) or callable(getattr(torch_private, name))
    monkeypatch.setitem(torch_private._MODULES, name, "torch._no_such_module")
    with pytest.raises(PacelineError, match=f"has no {name}, which plans need"):
        getattr(torch_private, name)


def test_what_a_plan_replaces_may_be_missing() -> None:
    from paceline.plan.fake_tensors import _replace

    owner = SimpleNamespace(there=1)
    with _replace(owner, "there", 2), _replace(owner, "missing", 3):
        assert vars(owner) == {"there": 2}
    assert vars(owner) == {"there": 1}
    assert hasattr(nn.Module, torch_private.MODULE_APPLY)
    assert hasattr(nn.init, torch_private.TRUNC_NORMAL)
