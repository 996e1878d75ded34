"""The solver section as a user writes it: groups, schedules, weights, freezing, averages, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support import forkserver

import paceline
from paceline.engine.run import Run
from paceline.optim.decays import multi_step
from paceline.optim.lr_scheduler import Schedule
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate
from paceline.run.summary import derivation

SMALL = {
    "model.widths": [4],
    "train.epochs": None,
    "train.steps": 6,
    "schedule.warmup": "none",
    "schedule.warmup_epochs": None,
    "logging.images": False,
}


def build(tmp_path: Path, **changes: object) -> Run:
    return paceline.build(
        "quickstart", {**SMALL, **{key.replace("__", "."): v for key, v in changes.items()}}, tmp_path
    )


def command(folder: Path, *arguments: str) -> forkserver.Done:
    overrides = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]
    return forkserver.paceline(folder, *arguments[:2], *overrides, *arguments[2:])


def test_how_a_batch_is_split_changes_neither_rate_nor_weights(tmp_path: Path) -> None:
    """1×64, 2×32 and 4×16, in float64 and without BatchNorm: the same after 20 steps to 1e-6."""
    finals, rates = [], []
    for micro in (64, 32, 16):
        run = build(tmp_path, train__steps=20, train__micro_batch_size=micro, schedule__decay="cosine")
        without_batch_norm(run.model)
        run.model.double()
        rates.append([paceline.train_step(run, update).lr for update in _in_double(run)])
        finals.append(torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()]))
    assert rates[0] == rates[1] == rates[2]
    assert torch.allclose(finals[0], finals[1], rtol=0, atol=1e-6)
    assert torch.allclose(finals[0], finals[2], rtol=0, atol=1e-6)


def without_batch_norm(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, torch.nn.BatchNorm2d):
                setattr(module, name, torch.nn.Identity())


def _in_double(run: Run):  # type: ignore[no-untyped-def]
    transform_batch = run.train_loader.transform_batch

    def in_double(*arguments):  # type: ignore[no-untyped-def]
        batch = transform_batch(*arguments)
        batch["image"] = batch["image"].double()
        return batch

    run.train_loader.transform_batch = in_double  # type: ignore[method-assign]
    return run.batches


def test_the_rules_of_the_batch(tmp_path: Path) -> None:
    common = {"optimizer__lr": 0.1, "optimizer__base_batch_size": 256}
    assert build(tmp_path, **common).scheduler.lr.lr == pytest.approx(0.1 * 64 / 256)
    square = build(tmp_path, **common, optimizer__lr_scaling="sqrt")
    assert square.scheduler.lr.lr == pytest.approx(0.1 * (64 / 256) ** 0.5)
    assert build(tmp_path, optimizer__lr=0.1).scheduler.lr.lr == 0.1


def test_the_ratio_of_logged_changes_is_a_key(tmp_path: Path) -> None:
    """Falling by a fifth each epoch: every one is more than 1.1, every second one more than 1.5."""
    for ratio, expected in ((1.1, 5), (1.5, 2)):
        run = build(tmp_path, logging__lr_change_ratio=ratio)
        assert sum(run.lr_changes(0.1 * 0.8**epoch) is not None for epoch in range(6)) == expected


def test_a_linear_probe_trains_the_head_alone(tmp_path: Path) -> None:
    trust = {"coefficient": 0.001, "clip": False, "eps": 0.0, "exclude_1d": True}
    optimizer = {"optimizer__name": "sgd", "optimizer__weight_decay": 0.0, "optimizer__trust_ratio": trust}
    run = build(tmp_path, model__head_batch_norm=True, model__freeze=["all_but_head"], **optimizer)
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    for step_batch in run.batches:
        paceline.train_step(run, step_batch)
    moved = {name for name, parameter in run.model.named_parameters() if not parameter.equal(before[name])}
    assert moved == {"head.1.weight", "head.1.bias"}
    assert int(run.model.get_buffer("head.0.num_batches_tracked")) == 6


def test_the_pet_recipe_has_its_rates_and_groups() -> None:
    """base·[f(1 − i/W) + i/W] while i ≤ W, then base·γ^(milestones ≤ i), with i = 1 at the first step."""
    recipe = validate(load("ssd300_pet")).recipe
    part = recipe.schedule
    arguments = dict(part.model_extra or {})
    schedule = Schedule(
        recipe.optimizer.lr, multi_step, arguments, total_steps=90_000, steps_per_epoch=500, count_from=part.count_from,
        warmup=part.warmup, warmup_steps=part.warmup_steps, warmup_from=part.warmup_from,
    )  # fmt: skip
    for i in (1, 250, 500, 501, 59_999, 60_000, 79_999, 80_000, 90_000):
        warm = 0.1 * (1 - i / 500) + i / 500 if i <= 500 else 0.1 ** ((i >= 60_000) + (i >= 80_000))
        assert schedule(i - 1) == pytest.approx(0.001 * warm, rel=1e-12)
    assert (recipe.optimizer.weight_decay, (recipe.optimizer.model_extra or {})["momentum"]) == (5e-4, 0.9)
    assert [each.preset for each in recipe.optimizer.param_groups] == ["pet"]


def test_the_derivation_that_is_printed(tmp_path: Path) -> None:
    overrides = ["data.batch_size=100", "train.micro_batch_size=50", "optimizer.lr=0.1", "optimizer.base_batch_size=25"]
    lines = derivation(Builder(validate(load("quickstart", overrides))).run(tmp_path))
    assert lines == [
        "batch    a step of 100 samples = 2 micro-batches of 50, on 1 process",
        "steps    60 per epoch, 540 in total",
        "lr       0.4 = 0.1 × 100 / 25 (base_batch_size)",
    ]
    square = Builder(validate(load("quickstart", [*overrides, "optimizer.lr_scaling=sqrt"])))
    assert derivation(square.run(tmp_path))[2] == "lr       0.2 = 0.1 × √(100 / 25) (base_batch_size)"


def test_frozen_parts_neither_move_nor_get_state_until_they_learn(tmp_path: Path) -> None:
    stages = [{"match": ["stages"], "at_steps": 3}]
    run = build(tmp_path, model__freeze=["all_but_head"], model__unfreeze=stages)
    first = run.model.get_parameter("stages.0.0.0.weight")
    before = first.detach().clone()
    statistics = run.model.get_buffer("stages.0.0.1.running_mean").clone()
    run.freezing.train_mode(run.model)
    for update in run.batches:
        if update.step in run.freezing.unfreeze_steps:
            assert torch.equal(first, before)
            assert first not in run.optimizer.state
            assert torch.equal(run.model.get_buffer("stages.0.0.1.running_mean"), statistics)
            run.freezing.apply(update.step)
        paceline.train_step(run, update)
    assert not torch.equal(first, before)
    assert first in run.optimizer.state
    assert not torch.equal(run.model.get_buffer("stages.0.0.1.running_mean"), statistics)


def test_a_run_with_everything_resumes_to_the_bit(tmp_path: Path) -> None:
    everything = [
        "optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.param_groups=[{preset: bias_double}]",
        "optimizer.layer_decay=0.8",
        "optimizer.trust_ratio={clip: true}", "schedule.decay=one_cycle",
        "schedule.momentum={decay: inverse_one_cycle, start: 0.95, end: 0.85}",
        "train.averaging={name: ema, decay: 0.9}", "train.clip_grad_norm=1", "model.freeze=[stages.0]",
        "model.unfreeze=[{match: [stages.0], at_steps: 3}]", "checkpoint.every_steps=2", "checkpoint.keep_last=9",
    ]  # fmt: skip
    whole = command(tmp_path, "train", "quickstart", *everything, "--out", "whole")
    assert whole.returncode == 0, whole.stderr
    start = tmp_path / "whole/checkpoints/step-00000002"
    resumed = command(tmp_path, "train", "quickstart", *everything, "--out", "resumed", "--from", str(start))
    assert resumed.returncode == 0, resumed.stderr
    for name in ("model.safetensors", "state.safetensors"):
        files = [tmp_path / run / "checkpoints/step-00000006" / name for run in ("whole", "resumed")]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_show_gives_groups_and_the_rate_of_each_at_every_step(tmp_path: Path) -> None:
    plot = tmp_path / "lr.png"
    entries = "optimizer.param_groups=[{kind: bias, lr_scale: 2, weight_decay: 0}, {kind: norm, weight_decay: 0}]"
    done = command(tmp_path, "show", "quickstart", entries, "schedule.decay=linear", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    groups = {group["label"]: group for group in found["groups"]}
    assert {label: (g["lr_scale"], g["weight_decay"]) for label, g in groups.items()} == {
        "weight": (1.0, 0.05),
        "norm": (1.0, 0.0),
        "bias": (2.0, 0.0),
    }
    assert groups["bias"]["names"] == ["head.bias"]
    assert found["schedule"]["bias"] == pytest.approx([0.006 * (6 - step) / 6 for step in range(6)])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_find_lr_suggests_a_rate_and_writes_nothing_else(tmp_path: Path) -> None:
    done = command(tmp_path, "find-lr", "quickstart", "--steps", "40", "--json", "--plot", str(tmp_path / "range.png"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lr"][0] == pytest.approx(1e-6)
    assert all(later > earlier for earlier, later in zip(found["lr"], found["lr"][1:], strict=False))
    assert 1e-5 < found["suggested"] < 3
    assert [path.name for path in tmp_path.iterdir()] == ["range.png"]


def test_find_lr_that_meets_nan_leaves_nothing_in_the_way_of_training(tmp_path: Path) -> None:
    found = command(tmp_path, "find-lr", "quickstart", "--low", "1e30", "--high", "1e38")
    assert (found.returncode, found.stdout) == (1, ""), found.stderr
    assert list(tmp_path.iterdir()) == []
    trained = command(tmp_path, "train", "quickstart")
    assert trained.returncode == 0, trained.stderr


def test_lazy_layers_take_their_shapes_from_the_data(tmp_path: Path) -> None:
    if paceline.register.kind("model").find("lazy") is None:

        @paceline.register.model("lazy")
        def lazy(num_classes: int) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(num_classes))

    no_warmup = {"schedule.warmup": "none", "schedule.warmup_epochs": None}
    run = paceline.build("quickstart", {"model.name": "lazy", **no_warmup}, tmp_path)
    assert run.model.get_parameter("1.weight").shape == (10, 784)
    before = run.model.get_parameter("1.weight").detach().clone()
    paceline.train_step(run, next(iter(run.batches)))
    assert not torch.equal(run.model.get_parameter("1.weight"), before)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch executed",))


def bad_files(folder: Path) -> None:
    torch.save({"weights": Trap()}, folder / "trap.pth")
    torch.save({"stages.0.0.0.weight": torch.zeros(4, 1, 5, 5)}, folder / "shapes.pth")


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("optimizer.name=sdg", 2, ['optimizer.name: unknown optimizer "sdg"', '"sgd"']),
        ("optimizer.beta=0.9", 2, ["optimizer.beta: unknown key", '"betas"']),
        (
            "optimizer.param_groups=[{match: backbone, lr_scale: 2}]",
            2,
            ["optimizer.param_groups.0", "backbone", "matches"],
        ),
        ("optimizer.param_groups=[{kind: nrom}]", 2, ["optimizer.param_groups.0.kind", "norm"]),
        ("model.freeze=[stagse]", 2, ["model.freeze", "stagse", "stages"]),
        ("model.freeze=[stages, head]", 2, ["model.freeze", "nothing to train"]),
        ("model.weights=trap.pth", 4, ["model.weights", "trap.pth"]),
        ("model.weights=shapes.pth", 4, ["model.weights", "[4, 1, 5, 5]", "[4, 1, 3, 3]"]),
        ("model.weights=missing.pth", 3, ["model.weights", "missing.pth does not exist"]),
        ("schedule={decay: multi_step, milestone_steps: [3, 99]}", 2, ["schedule.milestone_steps", "99"]),
        ("schedule={warmup: linear, warmup_steps: 6}", 2, ["schedule.warmup_steps", "train.steps (6)"]),
        ("train.averaging=emma", 2, ["train.averaging.name", '"ema"']),
        ("optimizer={name: rprop, weight_decay: 0.1}", 2, ["optimizer", "no weight decay"]),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, override: str, code: int, words: list[str]) -> None:
    bad_files(tmp_path)
    done = command(tmp_path, "train", "quickstart", override)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shapes.pth", "trap.pth"]
