"""Converted solvers have Pet's learning rates and parameter groups, by its formulas written out here once more."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from paceline.convert.convert_config import convert_config
from paceline.core.errors import RecipeError
from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.models.freezing import Freezing
from paceline.optim.group_presets import PRESETS
from paceline.optim.param_groups import build_groups
from paceline.recipe.build_context import BuildContext
from paceline.recipe.build_training import build_optimizer, make_scheduler
from paceline.recipe.load import load
from paceline.recipe.validate import validate

POLICIES: dict[str, dict[str, Any]] = {"STEP": {"STEPS": (3, 9)}, "COSINE": {}, "POLY": {"LR_POW": 0.9}}
UNITS = {"iterations": (1, "MAX_ITER", "WARM_UP_ITERS"), "epochs": (7, "MAX_EPOCHS", "WARM_UP_EPOCHS")}
WARM_UPS: list[dict[str, Any]] = [
    {},
    {"WARM_UP_METHOD": "CONSTANT", "WARM_UP_FACTOR": 1 / 3},
    {"WARM_UP_METHOD": "LINEAR", "WARM_UP_FACTOR": 0.1},
]
VARIANTS: list[dict[str, Any]] = [
    {"BASE_LR": 0.1},
    {"BASE_LR": 0.0025, "STEPS": (1, 4, 11), "GAMMA": 0.5, "LR_POW": 2.0},
    {"BASE_LR": 0.02, "STEPS": (12,), "GAMMA": 0.3, "LR_POW": 1.0},
]
UNITS["singular epochs"] = (1, "MAX_EPOCHS", "WARM_UP_EPOCH")  # an epoch of one iteration
GRID = list(itertools.product(POLICIES, UNITS, WARM_UPS, VARIANTS))


def pet_lr(solver: dict[str, Any], i: int, warmup: int, total: int, steps: list[int]) -> float:
    """The learning rate of iteration i, counted from 1."""
    base, power = float(solver["BASE_LR"]), float(solver.get("LR_POW", 0.9))
    if i <= warmup:
        factor = float(solver["WARM_UP_FACTOR"])
        if solver["WARM_UP_METHOD"] == "LINEAR":
            factor = factor * (1 - i / warmup) + i / warmup
        return base * factor
    if solver["LR_POLICY"] == "STEP":
        return base * float(solver["GAMMA"]) ** bisect_right(steps, i)
    if solver["LR_POLICY"] == "COSINE":
        return 0.5 * base * (1 + math.cos(math.pi * (i - warmup - 1) / (total - warmup)))
    return float(base * (1 - (i - warmup - 1) / (total - warmup)) ** power)


def converted(folder: Path, solver: dict[str, Any], *overrides: str) -> BuildContext:
    """The recipe that `paceline convert` writes for a solver, checked as every recipe is."""
    file, out = folder / "pet.yaml", folder / "recipe.yaml"
    written = {key: str(value) if isinstance(value, tuple) else value for key, value in solver.items()}
    train = {"BATCH_SIZE": 4, "DATASETS": "('imagenet1k_train', )"}
    file.write_text(yaml.safe_dump({"SOLVER": written, "TRAIN": train}))
    out.write_text(yaml.safe_dump(convert_config(file)[0]))
    return BuildContext(validate(load(str(out), overrides)), World(0, 1, 0, torch.device("cpu")))


def optimizer_of(one: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": one.parameters(), "lr_scale": 1.0}], lr=1.0)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_learning_rate_of_every_solver_is_that_of_pet(policy: str, unit: str, tmp_path: Path) -> None:
    assert len(GRID) == 81
    per_epoch, length_key, warmup_key = UNITS[unit]
    for warm_up, variant in itertools.product(WARM_UPS, VARIANTS):
        length, warmup = 12, 4 if warm_up else 0
        given = POLICIES[policy] | variant
        solver = {"LR_POLICY": policy, "GAMMA": 0.1, **given, **warm_up, length_key: length, warmup_key: warmup}
        total, steps = length * per_epoch, [step * per_epoch for step in given.get("STEPS", ())]
        context = converted(tmp_path, solver)
        scheduler = make_scheduler(context, optimizer_of(nn.Linear(1, 1)), Progress(total, per_epoch))
        found = [scheduler.apply(step) for step in range(total)]
        expected = [pet_lr(solver, i, warmup * per_epoch, total, steps) for i in range(1, total + 1)]
        assert found == pytest.approx(expected, rel=1e-15, abs=0)


def net() -> nn.Module:
    torch.manual_seed(0)
    stem = OrderedDict(conv=nn.Conv2d(3, 8, 3, bias=False), bn=nn.BatchNorm2d(8), relu=nn.ReLU())
    body = OrderedDict(conv=nn.Conv2d(8, 8, 3), gn=nn.GroupNorm(2, 8), relu=nn.ReLU())
    head = OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(8, 5))
    model = nn.Sequential(OrderedDict(stem=nn.Sequential(stem), body=nn.Sequential(body), head=nn.Sequential(head)))
    for parameter in model.parameters():  # norm layers start at 1 and 0, where decay hardly shows
        nn.init.normal_(parameter, std=0.5)
    return model.double()


def pet_optimizer(model: nn.Module, solver: dict[str, Any]) -> torch.optim.Optimizer:
    """Its three groups, by the name and by GroupNorm's type; Adam gets neither groups nor decay."""
    if solver["OPTIMIZER"] == "ADAM":
        return torch.optim.Adam(model.parameters(), lr=solver["BASE_LR"])
    norms = {
        f"{name}.{own}" for name, layer in model.named_modules() if isinstance(layer, nn.GroupNorm)
        for own in ("weight", "bias")
    }  # fmt: skip
    lists: dict[str, list[nn.Parameter]] = {"weight": [], "bias": [], "gn": []}
    for name, parameter in model.named_parameters():
        lists["bias" if "bias" in name else "gn" if name in norms else "weight"].append(parameter)
    decay = solver["WEIGHT_DECAY"]
    groups = [
        {"params": lists["weight"], "weight_decay": decay, "lr_scale": 1},
        {
            "params": lists["bias"],
            "weight_decay": decay if solver["BIAS_WEIGHT_DECAY"] else 0,
            "lr_scale": solver["BIAS_DOUBLE_LR"] + 1,
        },
        {"params": lists["gn"], "weight_decay": solver["WEIGHT_DECAY_GN"], "lr_scale": 1},
    ]
    kind: Any = {"SGD": torch.optim.SGD, "RMSPROP": torch.optim.RMSprop}[solver["OPTIMIZER"]]
    optimizer: torch.optim.Optimizer = kind(groups, lr=solver["BASE_LR"], momentum=solver["MOMENTUM"])
    return optimizer


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64),
            torch.randint(5, (4,), generator=generator),
        )
        for _ in range(30)
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
    optimizer.step()


@pytest.mark.parametrize("choices", [(True, False, 0.0), (True, False, 0.05), (False, True, 0.0), (True, True, 0.01)])
@pytest.mark.parametrize("name", ["SGD", "RMSPROP", "ADAM"])
def test_weights_after_thirty_steps_are_those_of_pet(name: str, choices: tuple[Any, ...], tmp_path: Path) -> None:
    keys = dict(zip(("BIAS_DOUBLE_LR", "BIAS_WEIGHT_DECAY", "WEIGHT_DECAY_GN"), choices, strict=True))
    solver = {
        "OPTIMIZER": name, "BASE_LR": 0.01 if name == "SGD" else 0.001, "MOMENTUM": 0.9, "WEIGHT_DECAY": 0.02, **keys,
        "LR_POLICY": "COSINE", "MAX_ITER": 30,
        "WARM_UP_METHOD": "LINEAR", "WARM_UP_ITERS": 5, "WARM_UP_FACTOR": 0.1,
    }  # fmt: skip
    theirs, ours = net(), net()
    context, progress = converted(tmp_path, solver), Progress(30, 30)
    optimizer = build_optimizer(context, ours, Freezing(ours, [], []), progress)
    scheduler = make_scheduler(context, optimizer, progress)
    reference = pet_optimizer(theirs, solver)
    for index, batch in enumerate(batches()):
        scheduler.apply(index)
        for group in reference.param_groups:
            group["lr"] = pet_lr(solver, index + 1, 5, 30, []) * group.get("lr_scale", 1)
        step(ours, optimizer, batch)
        step(theirs, reference, batch)
    start = net()
    for found, expected, before in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        assert not expected.equal(before)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_preset_is_pet() -> None:
    theirs, ours = net(), net()
    solver = {"OPTIMIZER": "SGD", "BASE_LR": 0.01, "MOMENTUM": 0.9, "WEIGHT_DECAY": 0.02, "WEIGHT_DECAY_GN": 0.0,
              "BIAS_DOUBLE_LR": True, "BIAS_WEIGHT_DECAY": False}  # fmt: skip
    preset = PRESETS["pet"]
    groups = build_groups(ours, 0.02, preset.kinds, preset.rules)
    optimizer = torch.optim.SGD([group.as_optimizer_group(0.01) for group in groups], momentum=0.9)
    reference = pet_optimizer(theirs, solver)
    for group in reference.param_groups:
        group["lr"] = 0.01 * group["lr_scale"]
    for batch in batches():
        step(ours, optimizer, batch)
        step(theirs, reference, batch)
    assert all(found.equal(expected) for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize(("epochs", "decay", "milestones"), [(1, "constant", None), (60, "multi_step", [30, 60])])
def test_a_converted_recipe_takes_another_length(
    epochs: int, decay: str, milestones: list[int] | None, tmp_path: Path
) -> None:
    """Milestones behind the end of a run that the command line shortens are left out, in its own recipe too."""
    solver = {"BASE_LR": 0.1, "MAX_EPOCHS": 90, "STEPS": (30, 60, 80), "WARM_UP_EPOCHS": 0}
    context = converted(tmp_path, solver, f"train.epochs={epochs}")
    assert any("80 dropped" in note for note in context.checked.notes)
    part = context.recipe.schedule
    assert (part.decay, (part.model_extra or {}).get("milestone_epochs")) == (decay, milestones)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(context.resolved()))
    again = BuildContext(validate(load(str(tmp_path / "again.yaml"))), context.world)
    for each in (context, again):
        scheduler = make_scheduler(each, optimizer_of(nn.Linear(1, 1)), Progress(epochs * 7, 7))
        expected = [0.1 * 0.1 ** sum(7 * step <= i for step in (30, 60)) for i in range(1, epochs * 7 + 1)]
        assert [scheduler.apply(index) for index in range(epochs * 7)] == pytest.approx(expected, rel=1e-15, abs=0)


def test_milestones_that_the_command_line_gives_itself_are_refused(tmp_path: Path) -> None:
    solver = {"MAX_EPOCHS": 90, "STEPS": (30,), "WARM_UP_EPOCHS": 0}
    context = converted(tmp_path, solver, "train.epochs=9", "schedule.milestone_epochs=[5, 30]")
    with pytest.raises(RecipeError, match=r"schedule\.milestone_epochs: .*got 30"):
        make_scheduler(context, optimizer_of(nn.Linear(1, 1)), Progress(63, 7))
