"""Operations and bytes of a step, by the formulas of its layers; seconds, by those of a device."""

import pytest
import torch
from torch import nn

from paceline.plan.cost import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    LAUNCH_SECONDS,
    LINK_EFFICIENCY,
    NETWORK,
    CostCounter,
    OperatorCost,
    StepCost,
    communication_seconds,
    sent_bytes,
)
from paceline.plan.devices import Speed, device_at_hand, parse_device
from paceline.recipe.load import load
from paceline.recipe.validate import validate

SPEED = Speed(bandwidth=1e9, flops={"fp32": 1e12, "tf32": 4e12, "bf16": 8e12, "fp16": 8e12}, source="this test")
FLOAT = 4


def counted(model: nn.Module, inputs: torch.Tensor) -> StepCost:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    with CostCounter().count(optimizer) as cost:
        model(inputs).sum().backward()
        optimizer.step()
    return cost


def test_a_linear_layer_has_the_operations_and_bytes_of_its_matrices() -> None:
    rows, inner, outer = 32, 64, 16
    cost = counted(nn.Linear(inner, outer, bias=False), torch.ones(rows, inner))
    assert cost.flops == 2 * (2 * rows * inner * outer)  # the output, and the gradient of the weights
    (update,) = cost.update
    weights = inner * outer * FLOAT
    assert update.bytes == 2 * 2 * weights  # weights and gradients, read and written
    product = FLOAT * (rows * inner + inner * outer + rows * outer)
    assert any(each.flops == 2 * rows * inner * outer and each.bytes == product for each in cost.passes)


def test_a_convolution_has_the_operations_of_its_windows() -> None:
    cost = counted(nn.Conv2d(3, 8, 3, bias=False), torch.ones(2, 3, 10, 10))
    assert cost.flops == 2 * (2 * 2 * 8 * 3 * 9 * 8 * 8)  # two images of 8 × 8 windows; forward and backward


def test_an_operator_takes_what_limits_it() -> None:
    computing = StepCost()
    computing.passes[OperatorCost(10**12, 8, "fp32")] = 1
    assert computing.seconds(SPEED) == pytest.approx(1 / COMPUTE_EFFICIENCY)
    assert computing.seconds(SPEED, is_tf32=True) == pytest.approx(0.25 / COMPUTE_EFFICIENCY)
    moving = StepCost()
    moving.passes[OperatorCost(8, 10**9, "bf16")] = 2
    assert moving.seconds(SPEED) == pytest.approx(2 / BANDWIDTH_EFFICIENCY)
    small = StepCost()
    small.update[OperatorCost(1, 8, "fp32")] = 10
    assert small.seconds(SPEED) == pytest.approx(10 * LAUNCH_SECONDS)


def test_more_micro_batches_repeat_the_passes_and_not_the_update() -> None:
    cost = counted(nn.Linear(8, 8, bias=False), torch.ones(4, 8))
    more = cost.repeated(3)
    assert more.update == cost.update
    assert sum(more.passes.values()) == 3 * sum(cost.passes.values())


@pytest.mark.parametrize(("gpu", "has_bf16"), [("v100-16gb", False), ("t4", False), ("a100-80gb", True), ("l4", True)])
def test_gpus_without_bf16_compute_it_as_fp32(gpu: str, has_bf16: bool) -> None:
    speed = parse_device(gpu).speed
    assert speed is not None
    assert (speed.flops["bf16"] > speed.flops["fp32"]) is has_bf16
    assert speed.flops["fp16"] >= speed.flops["tf32"] >= speed.flops["fp32"] > 0


def test_a_size_says_nothing_about_speed_and_the_machine_does() -> None:
    assert parse_device("24GiB").speed is None
    here = device_at_hand().speed
    assert here is not None
    assert here.bandwidth > 1e8


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("ddp", 2),  # gradients: reduced, and gathered
        ("fsdp", 2 * 3 + 1),  # parameters for two passes of three micro-batches, gradients once
        ("{name: fsdp, parameters: bf16}", 3 + 1),
        ("zero", 1 + 1),
    ],
)
def test_a_process_sends_all_parts_but_one(strategy: str, parts: int) -> None:
    model, processes = nn.Linear(8, 8), 4
    train = validate(load("quickstart", [f"train.strategy={strategy}"])).recipe.train
    assert sent_bytes(train, model, processes, micro_batches=3) == parts * (8 * 8 + 8) * FLOAT * 3 / 4
    assert sent_bytes(train, model, 1, micro_batches=3) == 0


def test_the_slowest_link_decides_and_one_that_is_not_known_does_not() -> None:
    a100 = parse_device("a100-80gb").speed
    assert a100 is not None
    assert communication_seconds(3 * 10**11, 8, a100) == pytest.approx(1 / LINK_EFFICIENCY)  # NVLink: 300 GB/s
    assert communication_seconds(3 * 10**11, 9, a100) == pytest.approx(3e11 / NETWORK / LINK_EFFICIENCY)
    assert communication_seconds(1, 2, SPEED) is None
