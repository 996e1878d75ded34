"""Private names of torch stand in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.core import torch_private

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


def test_one_kernel_does_what_each_tensor_would() -> None:
    factors = [torch.tensor(2.0), torch.tensor(3.0)]
    for name, arguments, options in (
        ("norm", (), {}),
        ("mul_", (0.5,), {}),
        ("mul_", (torch.tensor(0.3),), {}),
        ("mul_", (factors,), {}),
        ("add_", (others(),), {"alpha": 0.1}),
        ("lerp_", (others(), 0.3), {}),
        ("copy_", (others(),), {}),
    ):
        own, expected = tensors(), tensors()
        made = torch_private.foreach(name, own, *arguments, **options)
        alone = []
        for place, tensor in enumerate(expected):
            taken: Any = [each[place] if isinstance(each, list) else each for each in arguments]
            alone.append(getattr(tensor, name)(*taken, **options))
        torch.testing.assert_close(made if name == "norm" else own, alone, rtol=0, atol=0)


def test_a_module_is_compiled_on_its_first_call() -> None:
    module = nn.Linear(1, 1)
    assert not torch_private.is_compiled(module)
    torch_private.compile_call(module)
    assert torch_private.is_compiled(module)


def test_buffers_that_are_saved() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)
    assert torch_private.saved_buffers(module) == {"running_mean", "running_var", "num_batches_tracked"}


def test_a_process_group_has_a_store_and_counts_collectives() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        before = torch_private.num_collectives()
        dist.barrier()
        assert torch_private.num_collectives() > before
        assert torch_private.default_store().add("paceline", 1) == 1
    finally:
        dist.destroy_process_group()


def test_operators_and_what_they_return() -> None:
    assert torch_private.operator("_local_scalar_dense") is torch.ops.aten._local_scalar_dense.default
    assert not torch_private.returns_nothing(torch.ops.aten.add.Tensor)
    assert torch_private.returns_nothing(torch.ops.aten._foreach_add_.Scalar)


def test_a_backward_pass_is_recognized() -> None:
    seen = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append(torch_private.is_in_backward()))  # type: ignore[no-untyped-call]
    torch.autograd.backward(weight.sum())
    assert (seen, torch_private.is_in_backward()) == ([True], False)


def test_a_storage_has_one_key() -> None:
    tensor = torch.zeros(3)
    assert torch_private.storage_key(tensor.untyped_storage()) == torch_private.storage_key(
        tensor[1:].untyped_storage()
    )
