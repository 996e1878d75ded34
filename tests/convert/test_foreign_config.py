"""Configurations of Pet and of the JSON and DALI trainer become recipes; what is left out is named with its line."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from paceline.cli import main
from paceline.convert.convert_config import convert_config
from paceline.core.errors import RecipeError
from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.recipe.build_context import BuildContext
from paceline.recipe.build_training import make_scheduler
from paceline.recipe.document import lookup
from paceline.recipe.document import places as document_places
from paceline.recipe.load import load
from paceline.recipe.validate import validate

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"pet": ("ssd_VGG16_300x300_1x.yml", "yaml"), "dali-json": ("config.json", "json")}


def block(page: str, language: str, number: int = 0) -> str:
    text = (ROOT / "docs/coming-from" / f"{page}.md").read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return found[number]


def pet(tmp_path: Path, **solver: Any) -> tuple[dict[str, Any], list[str]]:
    """What a configuration of Pet with these keys in its solver becomes."""
    file = tmp_path / "pet.yaml"
    file.write_text(yaml.safe_dump({"SOLVER": solver, "TRAIN": {"BATCH_SIZE": 8, "DATASETS": "('imagenet', )"}}))
    return convert_config(file)


def about(remarks: list[str], *words: str) -> list[str]:
    """The remarks that hold all words."""
    return [remark for remark in remarks if all(word in remark for word in words)]


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


def test_epochs_of_pet_stay_epochs(tmp_path: Path) -> None:
    recipe, remarks = pet(tmp_path, MAX_EPOCHS=90, STEPS="(30, 60)", WARM_UP_EPOCHS=5, SNAPSHOT_EPOCHS=10)
    assert recipe["train"] == {"epochs": 90}
    assert recipe["schedule"]["milestone_epochs"] == [30, 60]
    assert recipe["schedule"]["warmup_epochs"] == 5
    assert recipe["checkpoint"] == {"every_epochs": 10}
    assert about(remarks, "not converted") == []


def test_what_pet_takes_for_keys_that_are_not_in_the_file_is_named(tmp_path: Path) -> None:
    recipe, remarks = pet(tmp_path, MAX_EPOCHS=90, STEPS=[30])
    assert recipe["schedule"] == {
        "decay": "multi_step", "milestone_epochs": [30], "gamma": 0.1, "count_from": 1,
        "warmup": "linear", "warmup_epochs": 5, "warmup_from": 0.1,
    }  # fmt: skip
    assert about(remarks, "SOLVER: ", "BASE_LR 0.001", "GAMMA 0.1", "WARM_UP_EPOCHS 5", "WARM_UP_FACTOR 0.1")
    assert about(remarks, "PIXEL_MEANS [102.9801, 115.9465, 122.7717]")
    assert "val" not in recipe["data"]


def test_pose_takes_other_values(tmp_path: Path) -> None:
    file = tmp_path / "pet.yaml"
    file.write_text("SOLVER: {MAX_EPOCHS: 140}\nPOSE: {}\nTRAIN:\n  BATCH_SIZE: 32\n  SCALES: ([288, 384],)\n")
    recipe, _ = convert_config(file)
    assert recipe["optimizer"]["param_groups"][1] == {"match": "*bias*", "lr_scale": 1, "weight_decay": 0.0005}
    assert (recipe["schedule"]["decay"], recipe["schedule"]["warmup_epochs"]) == ("cosine", 5)
    assert recipe["data"]["train"]["transforms"][0] == {"name": "pose_crop", "size": [384, 288]}


def test_warm_up_in_the_spelling_of_projects_that_grew_out_of_pet(tmp_path: Path) -> None:
    recipe, _ = pet(tmp_path, MAX_EPOCHS=90, WARM_UP_EPOCH=3)
    assert recipe["schedule"]["warmup_epochs"] == 3


def test_milestones_behind_the_end_are_left_out_aloud(tmp_path: Path) -> None:
    recipe, remarks = pet(tmp_path, MAX_ITER=1000, STEPS=[300, 1000, 1001])
    assert recipe["schedule"]["milestone_steps"] == [300, 1000]
    assert about(remarks, "SOLVER.STEPS: changed", "1001")


def test_groups_of_pet_other_than_its_own(tmp_path: Path) -> None:
    recipe, _ = pet(tmp_path, MAX_EPOCHS=9, BIAS_DOUBLE_LR=False, BIAS_WEIGHT_DECAY=True, WEIGHT_DECAY_GN=0.0001)
    assert recipe["optimizer"]["param_groups"] == [
        {"kind": "group_norm", "weight_decay": 0.0001},
        {"match": "*bias*", "lr_scale": 1, "weight_decay": 0.0005},
    ]


def test_a_solver_alone_is_converted_with_placeholders(tmp_path: Path) -> None:
    file = tmp_path / "pet.yaml"
    file.write_text("SOLVER: {BASE_LR: 0.1, MAX_ITER: 1000}")
    recipe, remarks = convert_config(file)
    assert recipe["optimizer"]["lr"] == 0.1
    assert about(remarks, f"{file}:1:1: SOLVER: ", "placeholders")
    assert about(remarks, f"{file}:1:1: TRAIN: ", "DATASETS", "BATCH_SIZE 16")


def test_adam_gets_what_pet_passes_to_it(tmp_path: Path) -> None:
    recipe, remarks = pet(tmp_path, MAX_EPOCHS=9, OPTIMIZER="ADAM", BASE_LR=0.002, WEIGHT_DECAY=0.1)
    assert recipe["optimizer"] == {"name": "adam", "lr": 0.002}
    assert [remark.split(": ")[1:3] for remark in about(remarks, "not conv")] == [
        ["SOLVER.WEIGHT_DECAY", "not converted"]
    ]


@pytest.mark.parametrize(
    ("tree", "task"),
    [
        ({"MODEL": {"FASTER_ON": True}, "TRAIN": {"SCALES": "(640, 800)", "DATASETS": ["CIHP_train"]}}, "detection"),
        ({"MODEL": {"RETINANET_ON": True, "MASK_ON": False}}, "detection"),
        ({"BACKBONE": {"CONV_BODY": "vgg"}, "TRAIN": {"DATASETS": "('coco_2017_train', )"}}, "detection"),
        ({"POSE": {}, "TRAIN": {"DATASETS": "('keypoints_coco_2017_train',)", "WEIGHTS": "r50.pth"}}, "keypoints"),
        (
            {"MODEL": {"CONV1_RGB2BGR": False}, "TRAIN": {"WEIGHTS": "a.pth", "DATASETS": ["cifar10", "b"]}},
            "classification",
        ),
        ({"CKPT": "ckpts/cls/r50 a/", "TEST": {"DATASETS": "mine"}}, "classification"),
    ],
)
def test_every_task_of_pet_becomes_a_valid_recipe(
    tree: dict[str, Any], task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "pet.yaml", tmp_path / "recipe.yaml"
    solver = {"MAX_ITER": 9000, "AMP": {"ENABLED": True, "OPT_LEVEL": "O2", "LOSS_SCALE": 128}}
    file.write_text(yaml.safe_dump({**tree, "SOLVER": solver}))
    assert main(["convert", str(file), "--out", str(out)]) == 0, capsys.readouterr().err
    recipe = validate(load(str(out))).recipe
    assert recipe.task.name == task
    assert (recipe.train.precision, recipe.train.loss_scale) == ("O2", 128)
    assert (recipe.data.val is not None) == ("TEST" in tree)


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("  FASTER_ON: True\n  MASK_ON: True", "pet.yaml:3:12: MODEL.MASK_ON: "),
        ("  FASTER_ON: True\n  KEYPOINT_ON: True", "pet.yaml:3:16: MODEL.KEYPOINT_ON: "),
        ("  SEMSEG_ON: True\n  NUM_CLASSES: 19", "pet.yaml:2:14: MODEL.SEMSEG_ON: "),
        ("  NUM_CLASSES: 19", "pet.yaml:2:3: MODEL: "),  # cityscapes, by the name of the data
        ("  SOMETHING_ON: True", "pet.yaml:2:17: MODEL.SOMETHING_ON: "),
    ],
)
def test_tasks_that_are_not_here_are_refused(
    lines: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = "TRAIN:\n  DATASETS: ('cityscapes_fine_train', )\n"
    Path("pet.yaml").write_text(f"MODEL:\n{lines}\nSOLVER: {{MAX_ITER: 1000}}\n{data}")
    assert main(["convert", "pet.yaml", "--out", "recipe.yaml"]) == 2
    assert capsys.readouterr().err.startswith(place)
    assert not Path("recipe.yaml").exists()


def test_augmentation_is_said_to_be_what_the_recipe_has(tmp_path: Path) -> None:
    file = tmp_path / "pet.yaml"
    train = "{DATASETS: imagenet, USE_FLIPPED: False, AUG: {RESIZE: 224, RANDOM_FLIP: True}}"
    file.write_text(f"SOLVER: {{MAX_ITER: 1000}}\nTRAIN: {train}\n")
    recipe, remarks = convert_config(file)
    names = ", ".join(each["name"] for each in recipe["data"]["train"]["transforms"])
    (line,) = about(remarks, "AUG")
    assert line.startswith(f"{file}:2:49: TRAIN.AUG: not converted: the recipe has {names};")


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


def dali(folder: Path, *changes: tuple[str, str]) -> Path:
    """The page's file with these changes of its text."""
    text = block("dali-json", "json")
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "config.json").write_text(text)
    return folder / "config.json"


def test_branches_are_frozen_without_whitespace_around_their_names(tmp_path: Path) -> None:
    file = dali(tmp_path, ('"freeze_branch": ""', '"freeze_branch": "features.0, features.1,"'))
    recipe, remarks = convert_config(file)
    assert recipe["model"]["freeze"] == ["features.0", "features.1"]
    assert about(remarks, f"{file}:14:", "model.freeze_branch: changed")  # that program would freeze neither


@pytest.mark.parametrize("override", ["train.epochs=1", "train.epochs=200", "optimizer.lr=0.01"])
@pytest.mark.parametrize("every", [1, 30])
def test_a_recipe_from_json_takes_the_usual_overrides(every: int, override: str, tmp_path: Path) -> None:
    file, out = dali(tmp_path, ('"lr_step": 1', f'"lr_step": {every}')), tmp_path / "recipe.yaml"
    assert main(["convert", str(file), "--out", str(out)]) == 0
    context = BuildContext(validate(load(str(out), [override])), World(0, 1, 0, torch.device("cpu")))
    lr, epochs = context.recipe.optimizer.lr, context.recipe.train.epochs
    assert epochs is not None
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr_scale": 1.0}], lr=1.0)
    scheduler = make_scheduler(context, optimizer, Progress(3 * epochs, 3))
    expected = [max(lr * 0.96 ** (step // 3 // every), 1e-6) for step in range(3 * epochs)]
    assert [scheduler.apply(step) for step in range(3 * epochs)] == pytest.approx(expected, rel=1e-15, abs=0)


def test_nothing_is_invented_for_keys_that_json_leaves_out(tmp_path: Path) -> None:
    rest = ('"eval_interval": 1, ', ""), ('"max_keep": 10, "save_interval": 1, ', ""), (', "max_rotate_angle": 30', "")
    file = dali(tmp_path, ('"lr_gamma": 0.96', '"lr_gama": 0.96'), (', "num_workers": 8', ""), *rest)
    recipe, remarks = convert_config(file)
    assert about(remarks, f"{file}:18:9: optimizer.lr_gama: not converted")
    assert about(remarks, "optimizer: ", "lr_gamma 1.0")
    assert recipe.keys().isdisjoint({"evaluate", "checkpoint"})
    assert "num_workers" not in recipe["data"]
    assert "random_rotation" not in [each["name"] for each in recipe["data"]["train"]["transforms"]]


def test_a_step_behind_the_end_is_left_out_aloud(tmp_path: Path) -> None:
    recipe, remarks = convert_config(dali(tmp_path, ('"lr_step": 1', '"lr_step": 100')))
    assert recipe["schedule"] == {"decay": "constant"}
    assert about(remarks, "optimizer.lr_step: not converted")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('"lr": 0.001', '"lr": "0.001"'), "config.json:17:15: optimizer.lr: expected a number > 0"),
        (('"name": "Adam"', '"name": "AdamW"'), "config.json:16:17: optimizer.name: expected one of SGD, Adam"),
        (('"name": "mobilenet_v2"', '"name": "mobilnet_v9"'), "config.json:14:23: model.name: expected mobilenet_v2"),
        (('"lr_min": 0.000001', '"lr_min": 0.1'), "config.json:20:19: optimizer.lr_min: expected at most"),
        (('"train_perc": 0.9', '"train_perc": 1'), "config.json:9:23: dataset.train_perc: expected a number"),
        (('"task": "classification"', '"task": "detection"'), "config.json:2:13: task: expected classification"),
        (('"root": "imagenet",', ""), "config.json:4:5: dataset.root: required"),
        (('"epoch": 100', '"epoch": 0'), "config.json:24:24: train.epoch: expected a whole number"),
    ],
)
def test_wrong_values_of_json_have_their_place(
    change: tuple[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(dali(tmp_path, change).parent)
    assert main(["convert", "config.json", "--out", "recipe.yaml"]) == 2
    assert capsys.readouterr().err.startswith(expected)
    assert not Path("recipe.yaml").exists()


ODD: list[Any] = [
    "",
    "x y",
    "O3",
    0,
    -1,
    3,
    0.5,
    1e30,
    True,
    None,
    [],
    [2, 1],
    {},
    {"a": 1},
    "(3, 5)",
    "([1, 2],)",
    "../ä",
]


@pytest.mark.parametrize("page", PAGES)
def test_any_value_gives_a_valid_recipe_or_an_error_with_its_place(page: str, tmp_path: Path) -> None:
    """What is converted is read again as a user's recipe is; mistakes name the line of the key."""
    name, language = PAGES[page]
    tree = yaml.safe_load(block(page, language))
    file, out = tmp_path / name, tmp_path / "recipe.yaml"
    places = [path for path in document_places(tree, ()) if path]
    misplaced = []
    for path, value in itertools.product(places, ODD):
        changed = json.loads(json.dumps(tree))
        lookup(changed, path[:-1])[path[-1]] = value
        file.write_text(json.dumps(changed, indent=1))
        try:
            recipe, lines = convert_config(file)
        except RecipeError as error:
            lines = error.problems
            misplaced += [(path, value, line) for line in lines if line.startswith(f"{file}:1:1: ")]
        else:
            out.write_text(yaml.safe_dump(recipe))
            validate(load(str(out)))
        misplaced += [(path, value, line) for line in lines if not re.match(rf"{re.escape(str(file))}:\d+:\d+: ", line)]
    assert misplaced == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SOLVER: {BASE_LR: fast}", "pet.yaml:1:19: SOLVER.BASE_LR: expected a number"),
        (
            'SOLVER: {BASE_LR: "0.1"}',
            'pet.yaml:1:19: SOLVER.BASE_LR: expected a number > 0, got "0.1"; remove the quotes',
        ),
        ("SOLVER: {BASE_LR: -1}", "pet.yaml:1:19: SOLVER.BASE_LR: expected a number > 0, got -1"),
        ("SOLVER: {STEPS: [early]}", "pet.yaml:1:17: SOLVER.STEPS: expected numbers"),
        ("SOLVER:\n  STEPS: (30, banana)", "pet.yaml:2:10: SOLVER.STEPS: expected numbers"),
        ("SOLVER: {STEPS: [30, 20]}", "pet.yaml:1:17: SOLVER.STEPS: expected increasing numbers"),
        ("SOLVER: {LR_POLICY: SPIRAL, MAX_ITER: 10}", "pet.yaml:1:21: SOLVER.LR_POLICY: expected one of STEP"),
        (
            "SOLVER: {OPTIMIZER: ADAMW}",
            'pet.yaml:1:21: SOLVER.OPTIMIZER: expected one of SGD, RMSPROP, ADAM, got "ADAMW"',
        ),
        ("SOLVER: {OPTIMIZER: {TYPE: SGD}}", "pet.yaml:1:21: SOLVER.OPTIMIZER: expected one of SGD"),
        ("SOLVER:\n  WARMUP_EPOCHS: 3", "pet.yaml:2:3: SOLVER.WARMUP_EPOCHS: unknown key; did you mean"),
        ("SOLVER: {AMP: {LEVEL: O1}}", "pet.yaml:1:16: SOLVER.AMP.LEVEL: unknown key"),
        ("SOLVER: {BASE_LR: 0.1}", "pet.yaml:1:9: SOLVER: expected MAX_ITER or MAX_EPOCHS"),
        (
            "SOLVER: {MAX_ITER: 10}",
            "pet.yaml:1:1: SOLVER.WARM_UP_ITERS: expected less than the run's 10 steps, got 500, Pet's default",
        ),
        ("SOLVER: {MAX_ITER: 10, WARM_UP_ITERS: 10}", "pet.yaml:1:39: SOLVER.WARM_UP_ITERS: expected less"),
        ("SOLVER: {MAX_EPOCHS: 9, WARM_UP_EPOCH: 3, WARM_UP_EPOCHS: 3}", "SOLVER.WARM_UP_EPOCH: cannot be given"),
        (
            "SOLVER: {MAX_EPOCHS: 9, LR_POLICY: STEP_COSINE, STEPS: [9]}",
            "pet.yaml:1:56: SOLVER.STEPS: expected the last",
        ),
        ("SOLVER: {}\nPIXEL_STDS: [1, 1]", "pet.yaml:2:13: PIXEL_STDS: expected"),
        ("SOLVER: 3", "pet.yaml:1:9: SOLVER: expected a mapping"),
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
