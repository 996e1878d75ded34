"""BatchNorm over several real processes equals BatchNorm over the whole batch in one."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.torchvision_ops import import_torchvision
from paceline.models.norm import SyncBatchNorm, convert_sync_batchnorm

SCRIPT = Path(__file__).resolve().parent / "scripts" / "synchronized.py"
Found = dict[str, Any]


class Scaled(nn.BatchNorm2d):
    """A BatchNorm with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Twice what it would be."""
        return 2 * super().forward(input)


def case(layer: nn.Module, shape: list[int], sizes: dict[int, list[int]], **options: Any) -> dict[str, Any]:
    """A layer, two steps of whole batches, and how many samples of them each process gets."""
    generator = torch.Generator().manual_seed(len(shape))
    dtype, layout = options.get("dtype", torch.float64), options.get("layout", torch.contiguous_format)
    layer = layer.to(options.get("weights", dtype)).train(options.get("training", True))
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    steps = []
    for _ in range(2):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + options.get("offset", 3.0)
        gradients = torch.randn(shape, generator=generator, dtype=torch.float64)
        steps.append(tuple(one.to(dtype).contiguous(memory_format=layout) for one in (values, gradients)))
    return {"layer": layer, "steps": steps, "sizes": sizes}


def cases() -> dict[str, dict[str, Any]]:
    shape, unequal = [9, 4, 3, 5], {2: [4, 5], 3: [2, 6, 1]}
    return {
        "images": case(nn.BatchNorm2d(4), shape, unequal),
        "far_from_zero": case(nn.BatchNorm2d(4), shape, unequal, offset=1e4),
        "channels_last": case(nn.BatchNorm2d(4), shape, unequal, layout=torch.channels_last),
        "some_without_samples": case(nn.BatchNorm2d(4), shape, {2: [9, 0], 3: [4, 0, 5]}),
        "a_single_value_each": case(nn.BatchNorm1d(4), [3, 4], {2: [1, 2], 3: [1, 1, 1]}),
        "videos": case(nn.BatchNorm3d(2), [4, 2, 2, 3, 3], {2: [1, 3], 3: [1, 1, 2]}),
        "cumulative": case(nn.BatchNorm2d(4, momentum=None), shape, unequal),
        "without_weights": case(nn.BatchNorm2d(4, affine=False), shape, unequal),
        "without_buffers": case(nn.BatchNorm2d(4, track_running_stats=False), shape, unequal),
        "evaluating": case(nn.BatchNorm2d(4), shape, unequal, training=False),
        "float32": case(nn.BatchNorm2d(4), shape, unequal, dtype=torch.float32),
        "bfloat16": case(nn.BatchNorm2d(4), shape, unequal, dtype=torch.bfloat16, weights=torch.float32),
        "half_of_everything": case(nn.BatchNorm2d(4), shape, unequal, dtype=torch.float16),
    }


NAMES = [
    *("images", "far_from_zero", "channels_last", "some_without_samples", "a_single_value_each", "videos"),
    *("cumulative", "without_weights", "without_buffers", "evaluating"),
    *("float32", "bfloat16", "half_of_everything"),
]
TOLERANCES = {"far_from_zero": 1e-8, "float32": 1e-5, "bfloat16": 3e-2, "half_of_everything": 1e-2}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The cases, and what the processes of each world got, by world and rank."""
    folder = tmp_path_factory.mktemp("synchronized")
    made = cases()
    assert list(made) == NAMES
    torch.save(made, folder / "cases.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([sys.executable, SCRIPT, folder, str(rank)], env=environment, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    try:
        errors = [process.communicate(timeout=120)[1].decode() for process in running]
        assert [process.returncode for process in running] == [0, 0, 0], "\n".join(errors)
    finally:
        for process in running:
            process.kill()
    found = {
        world: [torch.load(folder / f"found-{world}-{rank}.pt", weights_only=True) for rank in range(world)]
        for world in (2, 3)
    }
    return {"cases": made, "found": found}


def whole(case: dict[str, Any]) -> Found:
    """What a single process gets from whole batches."""
    layer, outputs, gradients = copy.deepcopy(case["layer"]), [], []
    for values, gradient in case["steps"]:
        leaf = values.clone().requires_grad_()
        output = layer(leaf)
        output.backward(gradient)
        outputs.append(output.detach())
        gradients.append(leaf.grad)
    return {
        "outputs": outputs,
        "input_gradients": gradients,
        "gradients": {name: parameter.grad for name, parameter in layer.named_parameters()},
        "buffers": dict(layer.named_buffers()),
    }


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_several_processes_equal_one_with_the_whole_batch(name: str, world: int, given: dict[str, Any]) -> None:
    expected, parts = whole(given["cases"][name]), [found[name] for found in given["found"][world]]
    tolerance = TOLERANCES.get(name, 1e-10)
    for what in ("outputs", "input_gradients"):
        for step in range(2):
            joined = torch.cat([part[what][step] for part in parts])
            assert close(joined, expected[what][step], tolerance), (what, step)
    for weight, gradient in expected["gradients"].items():
        assert close(sum(part["gradients"][weight] for part in parts), gradient, tolerance), weight
    for buffer, value in expected["buffers"].items():
        assert close(parts[0]["buffers"][buffer], value, tolerance), buffer
        assert all(torch.equal(part["buffers"][buffer], parts[0]["buffers"][buffer]) for part in parts), buffer


def test_layers_stay_the_same_objects() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3), nn.InstanceNorm2d(3)))
    layers, tensors, names = list(net.modules()), [*net.parameters(), *net.buffers()], list(net.state_dict())
    values = torch.randn(4, 2, 3, 3)
    expected = net(values)
    assert convert_sync_batchnorm(net) == 2
    assert all(a is b for a, b in zip(net.modules(), layers, strict=True))
    assert all(a is b for a, b in zip([*net.parameters(), *net.buffers()], tensors, strict=True))
    assert list(net.state_dict()) == names
    assert isinstance(net[1], SyncBatchNorm)
    assert isinstance(net.get_submodule("2.0"), SyncBatchNorm)
    assert torch.equal(net(values), expected)


def test_the_activation_of_timms_layers_stays() -> None:
    import_torchvision()
    from timm.layers import BatchNormAct2d

    layer = BatchNormAct2d(3, act_layer=nn.SiLU)
    values = torch.randn(4, 3, 2, 2)
    expected = layer(values)
    assert [convert_sync_batchnorm(layer), convert_sync_batchnorm(layer)] == [1, 1]
    assert isinstance(layer, SyncBatchNorm)
    assert torch.equal(layer(values), expected)


def test_a_model_without_batchnorm_has_none_to_convert() -> None:
    assert convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == 0


def test_converting_twice_changes_nothing_more() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3))
    assert [convert_sync_batchnorm(net), convert_sync_batchnorm(net)] == [1, 1]


def test_a_forward_pass_of_ones_own_is_refused_before_any_layer_is_changed() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), Scaled(3))
    with pytest.raises(ValueError, match="layer '1' is a Scaled"):
        convert_sync_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm2d
