"""A valid recipe, resolved and located; parts and what they inherit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import RecipeError
from paceline.core.registry import Registry, register
from paceline.recipe.document import Origin
from paceline.recipe.load import load, shipped_recipes
from paceline.recipe.validate import CheckedRecipe, validate

RECIPE = """\
name: fashion
task: classification
model: {name: convnet, depth: 2}
data:
  batch_size: 128
  train: {dataset: fashion_small, split: train, transforms: [random_horizontal_flip, {name: random_crop, size: 28}]}
  val: {dataset: fashion_small, split: test}
losses:
  - cross_entropy
optimizer: {name: sgd, lr: 0.1, momentum: 0.8}
train: {epochs: 20}
"""

Check = Callable[..., CheckedRecipe]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Validates r.yaml, written from a text, with overrides; further files by name."""
    monkeypatch.chdir(tmp_path)

    def check(text: str, *overrides: str, **files: str) -> CheckedRecipe:
        for name, content in {"r": text, **files}.items():
            Path(f"{name}.yaml").write_text(content)
        return validate(load("r.yaml", overrides))

    return check


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry of losses, whose additions are forgotten after the test."""
    registry = register.kind("loss")
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    return registry


def lines(check: Check, *arguments: str, **files: str) -> list[str]:
    with pytest.raises(RecipeError) as refusal:
        check(*arguments, **files)
    return refusal.value.problems


def extra(section: Any) -> dict[str, Any]:
    found: dict[str, Any] = section.model_extra
    return found


def test_parts_hold_all_their_arguments(check: Check) -> None:
    recipe = check(RECIPE).recipe
    assert recipe.optimizer.lr == 0.1
    assert extra(recipe.optimizer) == {"momentum": 0.8, "dampening": 0.0, "nesterov": False}
    assert extra(recipe.model) == {"widths": [32, 64, 128], "depth": 2, "dropout": 0.0}
    assert recipe.data.val is not None
    assert extra(recipe.data.val) == {"split": "test"}
    assert [(each.name, extra(each)) for each in recipe.data.train.transforms] == [
        ("random_horizontal_flip", {"p": 0.5}),
        ("random_crop", {"size": 28, "padding": 0, "fill": 0, "mask_fill": 0, "min_visible": 0.1}),
    ]


def test_parts_left_out_hold_their_arguments_too(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = register.kind("schedule")
    with monkeypatch.context() as patch:
        patch.setattr(schedules, "_entries", {})

        def constant(*, power: float = 0.9) -> None:
            """A schedule with an argument."""

        register.schedule("constant")(constant)
        assert extra(check(RECIPE).recipe.schedule) == {"power": 0.9}
    assert extra(check(RECIPE).recipe.schedule) == {}


def test_resolved_is_plain_whole_and_valid_again(check: Check) -> None:
    resolved = check(RECIPE).resolved()
    assert list(resolved)[:5] == ["name", "use", "task", "model", "data"]
    assert resolved["losses"] == [
        {"name": "cross_entropy", "weight": 1.0, "label_smoothing": 0.0, "class_weights": None}
    ]
    assert resolved["evaluate"]["batch_size"] == "auto"
    Path("again.json").write_text(json.dumps(resolved))
    assert validate(load("again.json")).resolved() == resolved


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name: str) -> None:
    document = load(name)
    checked = validate(document)
    assert checked.recipe.name == checked.resolved()["name"] == document.tree["name"]
    assert checked.recipe.expect == document.tree.get("expect", {})  # none is for another length


def test_places_for_later_messages(check: Check) -> None:
    checked = check(RECIPE, "train.seed=3")
    assert checked.locate("optimizer.lr") == "r.yaml:10:28: optimizer.lr"
    assert checked.locate("data.train.transforms.1.size") == "r.yaml:6:112: data.train.transforms.1.size"
    assert checked.locate("train.seed") == "command line: train.seed"
    assert checked.locate("optimizer.nesterov") == "r.yaml:10:1: optimizer.nesterov"
    assert checked.locate("losses.0.weight") == "r.yaml:9:5: losses.0.weight"
    assert checked.locate("schedule.decay") == "r.yaml:1:1: schedule.decay"
    assert checked.origin("optimizer.lr") == Origin("r.yaml", 10, 28)
    assert str(checked.origin("schedule.decay")) == "default"


def test_the_document_given_is_left_as_it_was(check: Check) -> None:
    check(RECIPE)
    document = load("r.yaml", ["optimizer=adamw"])
    before = json.dumps(document.tree)
    validate(document)
    assert json.dumps(document.tree) == before
    assert ("optimizer", "momentum") in document.values


def test_a_new_name_drops_the_arguments_of_the_old(check: Check) -> None:
    by_override = check(RECIPE, "optimizer=adamw")
    assert extra(by_override.recipe.optimizer) == {"betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": False}
    assert by_override.recipe.optimizer.lr == 0.1
    assert ("optimizer", "momentum") not in by_override.document.values
    by_file = check("extends: base.yaml\noptimizer: {name: adam, eps: 0.1}\n", base=RECIPE)
    assert extra(by_file.recipe.optimizer) == {"betas": [0.9, 0.999], "eps": 0.1, "amsgrad": False}


def test_arguments_that_are_dropped_are_listed_with_their_places(check: Check) -> None:
    (note,) = check(RECIPE, "optimizer.name=adamw").notes
    assert note.startswith("r.yaml:10:33: optimizer.momentum: dropped")
    assert note.endswith("(command line)")
    (note,) = check("extends: base.yaml\noptimizer: {name: adam}\n", base=RECIPE).notes
    assert note.startswith("base.yaml:10:33: optimizer.momentum: dropped")
    assert note.endswith("(r.yaml:2:19)")
    assert not check("extends: base.yaml\noptimizer: {name: sgd, momentum: 0.5}\n", base=RECIPE).notes


def test_another_data_set_drops_arguments_even_if_it_has_them_too(check: Check) -> None:
    folder = "{dataset: image_folder, root: photos, transforms: [random_horizontal_flip]}"
    base = RECIPE.replace("{dataset: fashion_small, split: test}", folder)
    checked = check("extends: base.yaml\ndata: {val: {dataset: list_file, file: a.csv}}\n", base=base)
    part = checked.recipe.data.val
    assert part is not None
    assert [extra(part)["root"], extra(part)["file"]] == [None, "a.csv"]
    assert [each.name for each in part.transforms] == ["random_horizontal_flip"]  # every data set takes them
    assert [note.split(": ")[:2] for note in checked.notes] == [["base.yaml:7:32", "data.val.root"]]
    (line,) = lines(check, "extends: base.yaml\ndata: {val: {dataset: idx, split: test}}\n", base=base)
    assert line.startswith("r.yaml:2:8: data.val.root: required, but missing (base.yaml:7:32: data.val.root: dropped")


def test_what_a_check_of_several_arguments_misses_is_shown_where_it_was_dropped(check: Check) -> None:
    (line,) = lines(check, RECIPE + "schedule: {decay: multi_step, milestone_steps: [3]}\n", "schedule=step_cosine")
    assert "milestone_steps, got none of them (r.yaml:12:31: schedule.milestone_steps: dropped" in line


@pytest.mark.parametrize(
    "override", ["model.backbone=timm/resnet34", "model.backbone=timm/resnet34 model.backbone_args={}"]
)
def test_another_backbone_drops_the_arguments_of_the_former(check: Check, override: str) -> None:
    base = RECIPE.replace("{name: convnet, depth: 2}", "{name: fpn, backbone: timm/resnet18, backbone_args: {aa: a}}")
    assert extra(check(base).recipe.model)["backbone_args"] == {"aa": "a"}
    checked = check(base, *override.split(), "model.width=8")
    assert not extra(checked.recipe.model)["backbone_args"]
    checked = check(base, "model={backbone: timm/resnet34, backbone_args: {bb: b}}")
    assert extra(checked.recipe.model)["backbone_args"] == {"bb": "b"}
    assert [note.split(": ")[:2] for note in checked.notes] == [["r.yaml:3:61", "model.backbone_args.aa"]]


def test_an_argument_given_along_with_the_new_name_is_not_dropped(check: Check) -> None:
    common = "name, lr, weight_decay, base_batch_size, lr_scaling, param_groups, layer_decay, layer_map, trust_ratio"
    known = f"known here: {common}, betas, eps, amsgrad"
    expected = [f"command line: optimizer.momentum: unknown key; {known}"]
    assert lines(check, RECIPE, "optimizer={name: adamw, momentum: 0.8}") == expected
    assert lines(check, RECIPE, "optimizer.name=adamw", "optimizer.momentum=0.8") == expected
    assert lines(check, RECIPE, "optimizer.momentum=0.8", "optimizer.name=adamw") == expected


def test_a_name_given_again_does_not_hide_mistakes_below(check: Check) -> None:
    base = RECIPE.replace("momentum", "momentun")
    assert lines(check, "extends: base.yaml\noptimizer: {name: sgd}\n", base=base) == [
        'base.yaml:10:33: optimizer.momentun: unknown key; did you mean "momentum"?'
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"top1": 0.9}),
        (["train.epochs=20", "train.seed=1"], {"top1": 0.9}),
        (["train.epochs=1"], {}),
        (["train.epochs=null", "train.steps=2"], {}),
        (["train.epochs=1", "expect.top1=0.5"], {"top1": 0.5}),
    ],
)
def test_expectations_hold_for_the_length_they_were_written_for(
    check: Check, overrides: list[str], expected: dict[str, float]
) -> None:
    checked = check(RECIPE + "expect: {top1: 0.9}\n", *overrides)
    assert checked.recipe.expect == checked.resolved()["expect"] == expected


def test_another_task_inherits_no_expectation(check: Check) -> None:
    base = RECIPE + "expect: {top1: 0.9}\n"
    assert check(base, "task=saliency").recipe.expect == {}
    assert check(base, "task=classification").recipe.expect == {"top1": 0.9}


def test_what_is_given_in_part_on_the_command_line_is_placed_there(check: Check) -> None:
    normalize = "{name: normalize, mean: [0.5], std: [0.5]}"
    base = RECIPE.replace("transforms: [random_horizontal_flip", f"transforms: [{normalize}")
    (line,) = lines(check, base, "data.train.transforms.0.mean=[1, 2]")
    assert line.startswith("command line: data.train.transforms.0: ")
    (line,) = lines(check, base.replace("std: [0.5]", "std: [0.5, 1]"), "train.seed=1")
    assert line.startswith("r.yaml:6:62: data.train.transforms.0: ")


def test_keys_that_exclude_each_other_are_both_placed(check: Check) -> None:
    base = RECIPE + "schedule: {warmup: linear, warmup_epochs: 5}\n"
    (line,) = lines(check, "extends: base.yaml\ntrain:\n  epochs: 3\n", base=base)
    assert line.startswith("base.yaml:12:43: schedule.warmup_epochs: ")
    assert line.endswith("train.epochs: r.yaml:3:11")
    (line,) = lines(check, base, "schedule.warmup_epochs=20")
    assert line.startswith("command line: schedule.warmup_epochs: ")
    assert "r.yaml" not in line


def test_a_problem_with_a_key_alone_gets_its_place(check: Check) -> None:
    checked = check(RECIPE, "optimizer=adam")
    found = checked.located(RecipeError(["model: x", "optimizer.lr: y", "optimizer: z", "photo.jpg: w", "a b: c"]))
    assert found.problems == [
        "r.yaml:3:15: model: x",
        "r.yaml:10:28: optimizer.lr: y",
        "command line: optimizer: z",
        "photo.jpg: w",
        "a b: c",
    ]


def test_a_recipe_that_changes_the_length_inherits_no_expectation(check: Check) -> None:
    base = RECIPE + "expect: {top1: 0.9}\n"
    assert check("extends: base.yaml\ntrain: {epochs: 5}\n", base=base).recipe.expect == {}
    repeated = "extends: base.yaml\ntrain: {epochs: 5}\nexpect: {top1: 0.9}\n"
    assert check(repeated, base=base).recipe.expect == {"top1": 0.9}
    assert check("extends: base.yaml\ntrain: {seed: 5}\n", base=base).recipe.expect == {"top1": 0.9}


def test_names_registered_by_a_user_are_checked_by_their_signature(check: Check, losses: Registry) -> None:
    @register.loss("mine")
    class Mine:
        def __init__(self, margin: float, *, pair: tuple[int, int] = (1, 2), anything=None) -> None:  # type: ignore[no-untyped-def]
            pass

        def forward(self, output: Any, target: Any) -> Any:
            return output

    text = RECIPE.replace("- cross_entropy", "- {name: mine, margin: 1, pair: [3, 4], anything: {a: [1]}}")
    (loss,) = check(text).recipe.losses
    assert extra(loss) == {"margin": 1.0, "pair": (3, 4), "anything": {"a": [1]}}
    assert check(text).resolved()["losses"][0]["pair"] == [3, 4]
    wrong = RECIPE.replace("- cross_entropy", "- {name: mine, pair: [3], anything: .nan}")
    assert lines(check, wrong) == [
        "r.yaml:9:5: losses.0.margin: required, but missing",
        "r.yaml:9:24: losses.0.pair: expected a list of 2 items, got [3]",
        "r.yaml:9:39: losses.0.anything: expected a finite number, got nan",
    ]


def test_problems_of_files_come_in_order_and_those_of_the_command_line_last(check: Check) -> None:
    base = RECIPE.replace("lr: 0.1", "lr: fast").replace("batch_size: 128", "batch_size: 0")
    found = lines(check, "extends: z.yaml\ntrain: {epochs: 0}\n", "name=-", "data.num_workers=x", z=base)
    assert [line.split(": ")[:2] for line in found] == [
        ["r.yaml:2:17", "train.epochs"],
        ["z.yaml:5:15", "data.batch_size"],
        ["z.yaml:10:28", "optimizer.lr"],
        ["command line", "data.num_workers"],
        ["command line", "name"],
    ]


def test_checking_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from paceline.recipe.load import load\n"
        "from paceline.recipe.validate import validate\n"
        "from paceline.recipe.json_schema import json_schema\n"
        "validate(load('quickstart')), json_schema()\n"
        "sys.exit(bool({'torch', 'numpy', 'timm', 'torchvision'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_warm_up_that_would_fill_a_shortened_run_takes_half_of_it(check: Check) -> None:
    text = RECIPE + "schedule: {decay: cosine, warmup: linear, warmup_epochs: 2}\n"
    checked = check(text, "train.epochs=1")
    assert checked.recipe.schedule.warmup_epochs == 0.5
    (note,) = checked.notes
    assert note.startswith("r.yaml:12:")
    assert "schedule.warmup_epochs: 2 shortened to 0.5" in note
    assert check(text, "train.epochs=3").recipe.schedule.warmup_epochs == 2
    assert "warmup_epochs" in lines(check, text, "train.epochs=1", "schedule.warmup_epochs=2")[0]
