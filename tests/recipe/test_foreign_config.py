"""Configurations of Pet and of the JSON and DALI trainer become recipes; what is left out is named with its line."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli import main
from paceline.commands.convert_config import convert_config
from paceline.core.registry import register
from paceline.optim.lr_scheduler import Schedule
from paceline.recipe.load import load
from paceline.recipe.validate import validate

ROOT = Path(__file__).resolve().parents[2]
GOLDEN: dict[str, Any] = json.loads((ROOT / "tests/golden/schedules.json").read_text())
PAGES = {"pet": ("ssd_VGG16_300x300_1x.yml", "yaml"), "dali-json": ("config.json", "json")}


def block(page: str, language: str, number: int = 0) -> str:
    text = (ROOT / "docs/coming-from" / f"{page}.md").read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return found[number]


def pet(tmp_path: Path, **solver: Any) -> tuple[dict[str, Any], list[str]]:
    """What a configuration of Pet with these keys in its solver becomes."""
    file = tmp_path / "pet.yaml"
    file.write_text(yaml.safe_dump({"SOLVER": solver, "TRAIN": {"BATCH_SIZE": 8}}))
    return convert_config(file)


@pytest.mark.parametrize("page", PAGES)
def test_the_files_of_the_pages_become_the_recipes_beside_them(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, language = PAGES[page]
    Path(name).write_text(block(page, language))
    Path("theirs.yaml").write_text(block(page, "yaml", -1))
    assert main(["convert", name, "--out", "converted.yaml"]) == 0
    printed = capsys.readouterr().out.splitlines()
    found, expected = (validate(load(file)).resolved() for file in ("converted.yaml", "theirs.yaml"))
    assert found == expected
    assert set(block(page, "text").splitlines()) <= set(printed)
    lines = Path("converted.yaml").read_text().splitlines()
    assert [line for line in lines if line.startswith("#")][1:] == [f"# {line}" for line in printed[:-1]]


def test_what_is_printed_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(block("dali-json", "json"))
    assert main(["convert", str(file)]) == 0
    (tmp_path / "recipe.yaml").write_text(capsys.readouterr().out)
    assert validate(load(str(tmp_path / "recipe.yaml"))).recipe.data.loader == "dali"
    assert main(["convert", str(file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["recipe"]["optimizer"] == {"name": "adam", "lr": 0.001}
    assert len(printed["remarks"]) == 11


@pytest.mark.parametrize("warmup", ["CONSTANT", "LINEAR"])
@pytest.mark.parametrize("policy", ["STEP", "STEP_COSINE", "COSINE", "POLY"])
def test_the_converted_solver_has_the_learning_rates_of_pet(policy: str, warmup: str, tmp_path: Path) -> None:
    recipe, _ = pet(
        tmp_path, LR_POLICY=policy, WARM_UP_METHOD=warmup, BASE_LR=0.001, MAX_ITER=90_000, STEPS=[60_000, 80_000]
    )
    keys = dict(recipe["schedule"])
    entry = register.kind("schedule").find(keys.pop("decay"))
    assert entry is not None
    common = {key: keys.pop(key) for key in list(keys) if key in inspect.signature(Schedule).parameters}
    lr = Schedule(recipe["optimizer"]["lr"], entry.resolve(), keys, total_steps=90_000, steps_per_epoch=7000, **common)
    golden = GOLDEN["pet steps, W=500 T=90000"][f"{policy.lower()} {warmup.lower()}"]
    assert {i: lr(int(i) - 1) for i in golden} == pytest.approx(golden, rel=1e-12)


def test_epochs_of_pet_stay_epochs(tmp_path: Path) -> None:
    recipe, remarks = pet(tmp_path, MAX_EPOCHS=90, STEPS="(30, 60)", WARM_UP_EPOCHS=5, SNAPSHOT_EPOCHS=10)
    assert recipe["train"] == {"epochs": 90}
    assert recipe["schedule"]["milestone_epochs"] == [30, 60]
    assert recipe["schedule"]["warmup_epochs"] == 5
    assert recipe["checkpoint"] == {"every_epochs": 10}
    assert remarks == []


def test_groups_of_pet_other_than_its_own(tmp_path: Path) -> None:
    recipe, _ = pet(tmp_path, BIAS_DOUBLE_LR=False, BIAS_WEIGHT_DECAY=True, WEIGHT_DECAY_GN=0.0001)
    assert recipe["optimizer"]["param_groups"] == [
        {"kind": "bias", "lr_scale": 1},
        {"kind": "group_norm", "weight_decay": 0.0001},
    ]


def test_a_batch_size_that_is_not_in_the_file_is_assumed_aloud(tmp_path: Path) -> None:
    file = tmp_path / "pet.yaml"
    file.write_text("SOLVER: {MAX_ITER: 10}")
    recipe, remarks = convert_config(file)
    assert recipe["data"]["batch_size"] == 16
    assert [remark.split(": ")[:2] for remark in remarks] == [[f"{file}:1:1", "TRAIN.BATCH_SIZE"]]


def test_adam_gets_what_pet_passes_to_it(tmp_path: Path) -> None:
    recipe, remarks = pet(tmp_path, OPTIMIZER="ADAM", BASE_LR=0.002, WEIGHT_DECAY=0.1)
    assert recipe["optimizer"] == {"name": "adam", "lr": 0.002}
    assert [remark.split(": ")[1:3] for remark in remarks] == [["SOLVER.WEIGHT_DECAY", "not converted"]]


@pytest.mark.parametrize(
    ("tree", "task"),
    [
        ({"MODEL": {"FASTER_ON": True}, "TRAIN": {"SCALES": "(640, 800)", "DATASETS": ["CIHP_train"]}}, "detection"),
        ({"MODEL": {"RETINANET_ON": True}}, "detection"),
        ({"POSE": {}, "TRAIN": {"DATASETS": "('keypoints_coco_2017_train',)", "WEIGHTS": "r50.pth"}}, "keypoints"),
        (
            {"MODEL": {"CONV1_RGB2BGR": False}, "TRAIN": {"WEIGHTS": "a.pth", "DATASETS": ["a", "b"]}},
            "classification",
        ),
    ],
)
def test_every_task_of_pet_becomes_a_valid_recipe(
    tree: dict[str, Any], task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "pet.yaml", tmp_path / "recipe.yaml"
    file.write_text(
        yaml.safe_dump({**tree, "SOLVER": {"AMP": {"ENABLED": True, "OPT_LEVEL": "O2", "LOSS_SCALE": 128}}})
    )
    assert main(["convert", str(file), "--out", str(out)]) == 0, capsys.readouterr().err
    recipe = validate(load(str(out))).recipe
    assert recipe.task.name == task
    assert (recipe.train.precision, recipe.train.loss_scale) == ("O2", 128)


def test_keys_without_a_counterpart_have_their_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(block("dali-json", "json").replace('"use_amp": 1', '"use_amp": 0, "cards": [0, 1]'))
    recipe, remarks = convert_config(file)
    assert "precision" not in recipe["train"]
    (line,) = [remark for remark in remarks if "no counterpart" in remark]
    assert line.startswith(f"{file}:3:30: device.cards: not converted")


def test_frozen_and_pretrained_parts(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    files = '{"pretrain": "m.pth", "exclude": ["classifier"], "checkpoint": 7}'
    text = block("dali-json", "json").replace('"model_file": {}', f'"model_file": {files}').replace('"Adam"', '"SGD"')
    file.write_text(text.replace('"freeze_branch": ""', '"freeze_branch": "features,conv1"'))
    recipe, remarks = convert_config(file)
    assert recipe["model"]["weights"] == {"file": "m.pth", "exclude": ["classifier.*"]}
    assert recipe["model"]["freeze"] == ["features", "conv1"]
    assert recipe["optimizer"] == {"name": "sgd", "lr": 0.001, "momentum": 0.2, "weight_decay": 0.00004}
    assert [remark for remark in remarks if "model.model_file.checkpoint: not converted" in remark]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SOLVER: {BASE_LR: fast}", "pet.yaml:1:19: SOLVER.BASE_LR: expected a number"),
        ("SOLVER: {STEPS: [early]}", "pet.yaml:1:17: SOLVER.STEPS: expected numbers"),
        ("SOLVER: {LR_POLICY: SPIRAL, MAX_ITER: 10}", "schedule.decay"),
        ("optimizer: {lr: 1}", "neither"),
        ("- 1", "mapping"),
    ],
)
def test_wrong_files_are_refused(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pet.yaml").write_text(text)
    assert main(["convert", "pet.yaml", "--out", "recipe.yaml"]) == 2
    assert expected in capsys.readouterr().err
    assert not Path("recipe.yaml").exists()
