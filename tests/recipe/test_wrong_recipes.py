"""Wrong recipes, each with the place, the key and the beginning of what is said about it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import RecipeError
from paceline.core.registry import TABLE
from paceline.recipe.load import load
from paceline.recipe.validate import validate

RECIPE = """\
name: fashion
task: classification
model:
  name: timm/resnet18
  weights: null
data:
  batch_size: 128
  train: {dataset: idx, root: data, split: train, transforms: [random_horizontal_flip]}
  val:   {dataset: idx, root: data, split: test}
losses:
  - {name: cross_entropy, label_smoothing: 0.1}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
schedule:
  decay: cosine
  warmup: linear
  warmup_epochs: 1
train:
  epochs: 20
  micro_batch_size: 32
"""
OPTIMIZER_KEYS = (
    "name, lr, weight_decay, base_batch_size, lr_scaling, param_groups, layer_decay, layer_map, trust_ratio, "
)
LOSSES = ", ".join(json.loads(TABLE.read_text(encoding="utf-8"))["loss"])
OPTIMIZERS = (
    "adadelta, adafactor, adagrad, adam, adamax, adamw, asgd, muon, nadam, radam, rmsprop, rprop, sgd, timm/NAME"
)
SECTIONS = (
    "extends, name, use, task, model, data, losses, optimizer, schedule, train, evaluate, checkpoint, logging, expect"
)


@dataclass(frozen=True)
class Wrong:
    """The recipe above with some text replaced, or with overrides, and what is said about it."""

    lines: list[str]
    change: tuple[str, str] = ("", "")
    overrides: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        assert self.change[0] in RECIPE
        return RECIPE.replace(*self.change, 1) if self.change[0] else self.change[1] + RECIPE


def edit(old: str, new: str, *lines: str) -> Wrong:
    return Wrong([f"recipe.yaml:{line}" for line in lines], change=(old, new))


def parted(train: str, validation: str, *lines: str) -> Wrong:
    """Both splits from other places than usual."""
    old = (
        "{dataset: idx, root: data, split: train, transforms: [random_horizontal_flip]}",
        "{dataset: idx, root: data, split: test}",
    )
    return edit("\n  val:   ".join(old), f"{{{train}}}\n  val:   {{{validation}}}", *lines)


def drawn(validation: str, *lines: str) -> Wrong:
    """Both splits drawn out of one folder."""
    train = "dataset: image_folder, root: data, split: train, split_shares: {train: 0.8, val: 0.2}"
    return parted(train, f"dataset: image_folder, root: data, {validation}", *lines)


def typed(override: str, *lines: str) -> Wrong:
    return Wrong([f"command line: {line}" for line in lines], overrides=(override,))


MODELS = '"timm/resnet18", "timm/resnet18d" or "timm/skresnet18"?'
WRONG = {
    "endless value": Wrong(
        [f"command line: model.backbone: expected timm/NAME or torchvision/NAME, got '{'y' * 199}…"],
        overrides=("model=unet", "model.backbone=" + "y" * 2000),
    ),
    # numbers
    "number as word": edit("lr: 0.1", "lr: fast", '12:28: optimizer.lr: expected a number > 0, got "fast"'),
    "number quoted": edit("0.1,", '"0.1",', '12:28: optimizer.lr: expected a number > 0, got "0.1"; remove the quotes'),
    "number zero": edit("lr: 0.1", "lr: 0", "12:28: optimizer.lr: expected a number > 0, got 0"),
    "number negative": edit("lr: 0.1", "lr: -0.1", "12:28: optimizer.lr: expected a number > 0, got -0.1"),
    "number nan": edit("lr: 0.1", "lr: .nan", "12:28: optimizer.lr: expected a finite number, got nan"),
    "number infinite": edit("lr: 0.1", "lr: 1e999", "12:28: optimizer.lr: expected a finite number, got inf"),
    "number boolean": edit("lr: 0.1", "lr: true", "12:28: optimizer.lr: expected a number > 0, got true"),
    "number null": edit("lr: 0.1", "lr: null", "12:28: optimizer.lr: expected a number > 0, got null"),
    "number empty": edit(
        "batch_size: 128", "batch_size:", "7:14: data.batch_size: expected a whole number from 1 to 1048576, got null"
    ),
    "number list": edit("lr: 0.1", "lr: [0.1]", "12:28: optimizer.lr: expected a number > 0, got [0.1]"),
    "whole number as fraction": edit(
        "128", "12.5", "7:15: data.batch_size: expected a whole number from 1 to 1048576, got 12.5"
    ),
    "whole number as float": edit(
        "128", "1e2", "7:15: data.batch_size: expected a whole number from 1 to 1048576, got 100.0; write 100"
    ),
    "whole number zero": edit("128", "0", "7:15: data.batch_size: expected a whole number from 1 to 1048576, got 0"),
    "whole number or word": edit(
        "micro_batch_size: 32",
        "micro_batch_size: fast",
        '19:21: train.micro_batch_size: expected a whole number from 1 to 1048576 or auto, got "fast"',
    ),
    "whole number or null": edit(
        "epochs: 20",
        "epochs: many",
        '18:11: train.epochs: expected a whole number from 1 to 1000000 or null, got "many"',
    ),
    "share above": edit(
        "momentum: 0.9", "momentum: 1.5", "12:43: optimizer.momentum: expected a number ≥ 0 and < 1, got 1.5"
    ),
    "share of another": edit(
        "decay: cosine",
        "decay: cosine\n  warmup_from: 2",
        "15:16: schedule.warmup_from: expected a number from 0 to 1, got 2",
    ),
    # words
    "choice": edit(
        "warmup: linear",
        "warmup: linaer",
        '15:11: schedule.warmup: expected one of none, constant, linear, got "linaer"; did you mean "linear"?',
    ),
    "choice far off": edit(
        "warmup: linear", "warmup: 5", "15:11: schedule.warmup: expected one of none, constant, linear, got 5"
    ),
    "choice in a part": edit(
        "split: test", "split: val", '9:44: data.val.split: expected one of train, test, got "val"'
    ),
    "string number": edit(
        "weights: null", "weights: 3", "5:12: model.weights: expected a string, a mapping or null, got 3; quote it"
    ),
    "string boolean": edit(
        "weights: null",
        "weights: true",
        "5:12: model.weights: expected a string, a mapping or null, got true; quote it",
    ),
    "string empty": edit("root: data", 'root: ""', '8:31: data.train.root: expected a non-empty string, got ""'),
    "string pattern": edit(
        "name: fashion",
        "name: a/b",
        "1:7: name: expected a string of letters, digits, dots, hyphens and underscores, at most 100 of them,"
        ' got "a/b"',
    ),
    "boolean word": typed("data.drop_last=yes", 'data.drop_last: expected true or false, got "yes"'),
    "boolean number": typed("data.drop_last=1", "data.drop_last: expected true or false, got 1"),
    # lists and mappings
    "list as name": edit(
        "losses:\n  - {name: cross_entropy, label_smoothing: 0.1}",
        "losses: cross_entropy",
        '10:9: losses: expected a list, got "cross_entropy"; write ["cross_entropy"]',
    ),
    "list empty": typed("losses=[]", "losses: expected a list of at least 1 item, got none"),
    "losses of a task that brings its own": Wrong(
        ["recipe.yaml:11:3: losses: task detection brings its own losses; remove these"], overrides=("task=detection",)
    ),
    "list length": typed(
        "optimizer={name: adamw, betas: [0.9]}", "optimizer.betas: expected a list of 2 items, got [0.9]"
    ),
    "list item": typed("task.top_k=[1, 0]", "task.top_k.1: expected a whole number ≥ 1, got 0"),
    "mapping as list": edit(
        "train:\n  epochs: 20\n  micro_batch_size: 32", "train: [20]", "17:8: train: expected a mapping, got [20]"
    ),
    "section empty": edit(
        "train:\n  epochs: 20\n  micro_batch_size: 32", "train:", "17:7: train: expected a mapping, got null"
    ),
    "part as number": edit("task: classification", "task: 1", "2:7: task: expected a name or a mapping, got 1"),
    "optional part as list": typed("data.test=[1]", "data.test: expected a name, a mapping or null, got [1]"),
    "depth without end": typed(
        "model={name: convnet, depth: 10000000}", "model.depth: expected a whole number from 1 to 1000, got 10000000"
    ),
    "weight that is no float32": typed(
        "losses.0.weight=1e300", "losses.0.weight: expected a number from 0 to 1e+30, got 1e+300"
    ),
    "threads without number": typed(
        "train.threads=100000", "train.threads: expected a whole number from 1 to 1024 or auto, got 100000"
    ),
    "image beyond memory": typed(
        "data.train.transforms=[{name: resize, size: [8, 1000000]}]",
        "data.train.transforms.0.size.1: expected a whole number from 1 to 32767, got 1000000",
    ),
    "metric as word": typed("expect.top1=high", 'expect.top1: expected a number, got "high"'),
    # keys
    "key misspelt": edit("  epochs: 20", "  epoch: 20", '18:3: train.epoch: unknown key; did you mean "epochs"?'),
    "section misspelt": edit(
        "optimizer:",
        "optimiser:",
        "1:1: optimizer: required, but missing",
        '12:1: optimiser: unknown key; did you mean "optimizer"?',
    ),
    "key in the wrong section": edit("", "lr: 0.1\n", '1:1: lr: unknown key; did you mean "optimizer.lr"?'),
    "extends misspelt": edit("", "extend: base\n", '1:1: extend: unknown key; did you mean "extends"?'),
    "key of another name": edit(
        "momentum: 0.9",
        "betas: [0.9, 0.99]",
        "12:33: optimizer.betas: unknown key; known here: " + OPTIMIZER_KEYS + "momentum, dampening, nesterov",
    ),
    "key of a part misspelt": edit(
        "label_smoothing",
        "label_smooting",
        '11:27: losses.0.label_smooting: unknown key; did you mean "label_smoothing"?',
    ),
    "common key of a part misspelt": typed("losses.0.wieght=2", 'losses.0.wieght: unknown key; did you mean "weight"?'),
    "key missing": edit("lr: 0.1, ", "", "12:1: optimizer.lr: required, but missing"),
    "argument missing": edit("root: data, split: train", "root: data", "8:3: data.train.split: required, but missing"),
    "argument missing in a list": typed(
        "data.train.transforms=[resize]", "data.train.transforms.0.size: required, but missing"
    ),
    "section missing": edit("task: classification\n", "", "1:1: task: required, but missing"),
    "name missing": edit(
        "name: sgd, ", "", "12:1: optimizer.name: required, but missing; expected one of " + OPTIMIZERS
    ),
    # names
    "name misspelt": edit(
        "decay: cosine",
        "decay: cosin",
        '14:10: schedule.decay: unknown schedule "cosin"; did you mean "cosine"?',
    ),
    "name in capitals": edit(
        "name: sgd", "name: SGD", '12:19: optimizer.name: unknown optimizer "SGD"; did you mean "sgd"?'
    ),
    "name unknown": edit(
        "name: cross_entropy",
        "name: zzz",
        f'11:12: losses.0.name: unknown loss "zzz" (--use FILE brings parts of your own; in Python, import it);'
        f" expected one of {LOSSES}",
    ),
    "a name of one's own": edit(
        "timm/resnet18", "my_model", '4:9: model.name: unknown model "my_model" (--use FILE brings parts'
    ),
    "name of a library misspelt": edit(
        "timm/resnet18",
        "timm/resnet18x",
        f'4:9: model.name: unknown model "timm/resnet18x"; did you mean {MODELS}',
    ),
    "name without its library": edit(
        "timm/resnet18",
        "resnet18",
        '4:9: model.name: unknown model "resnet18"; did you mean "timm/resnet18" or "torchvision/resnet18"?',
    ),
    "name as number": edit("name: sgd", "name: 5", "12:19: optimizer.name: expected one of " + OPTIMIZERS + ", got 5"),
    "short name unknown": edit(
        "[random_horizontal_flip]",
        "[mixop]",
        '8:64: data.train.transforms.0.name: unknown transform "mixop"; did you mean "mixup"?',
    ),
    # what does not go together
    "epochs and steps": typed("train.steps=9", "train.steps: incompatible with train.epochs"),
    "neither epochs nor steps": edit(
        "  epochs: 20\n", "", "17:1: train.epochs: expected train.epochs or train.steps, got neither"
    ),
    "micro-batch above batch": edit(
        "128", "16", "19:21: train.micro_batch_size: expected at most data.batch_size (16), got 32"
    ),
    "own rule of an argument": edit(
        "[random_horizontal_flip]",
        "[{name: normalize, mean: [0.5], std: [1, 1]}]",
        "8:64: data.train.transforms.0: expected mean and std of the same length, got 1 and 2",
    ),
    "two draws of one split": drawn(
        "split: val, split_shares: {train: 0.8, val: 0.2}, split_seed: 1",
        "9:108: data.val.split_seed: differs from data.train.split_seed",
    ),
    "only one split by class": drawn(
        "split: val, split_shares: {train: 0.8, val: 0.2}, stratify: false",
        "9:106: data.val.stratify: differs from data.train.stratify",
    ),
    "the same part twice": drawn(
        "split: train, split_shares: {train: 0.8, val: 0.2}",
        "9:53: data.val.split: is the same split",
    ),
    "the same words of a list twice": parted(
        "dataset: list_file, file: a.csv, split: train, split_column: part",
        "dataset: list_file, file: a.csv, split: train, split_column: part",
        "9:51: data.val.split: is the same split",
    ),
    "mixing in evaluation": edit(
        "split: test}",
        "split: test, transforms: [mixup]}",
        "9:63: data.val.transforms.0: mixup is for training",
    ),
    # the text itself
    "odd key": edit("", '"a\\nb": 1\n', r"1:1: a\nb: unknown key; known here: " + SECTIONS),
    "duplicate key": edit(
        "  batch_size: 128", "  batch_size: 128\n  batch_size: 64", "8:3: data.batch_size: given twice; first at 7:3"
    ),
    "tag": edit("lr: 0.1", "lr: !!float 0.1", "12:28: tag !!float is not allowed; a recipe holds plain values only"),
    "merge key": edit(
        "lr: 0.1", "<<: {lr: 0.1}", "12:24: merge keys (<<) are not supported; use extends, or repeat the values"
    ),
    "tab": edit(
        "  epochs: 20",
        "\tepochs: 20",
        "18:1: not valid YAML: found character that cannot start any token, "
        "while scanning for the next token from line 18; indent with spaces, not tabs",
    ),
    # the command line
    "index": typed("losses.1.weight=2", "losses.1.weight=2: losses has 1 item, counted from 0"),
    "tagged override": typed(
        "train.seed=!x 1", "train.seed=!x 1: tag !x is not allowed; a recipe holds plain values only"
    ),
    "unknown key override": typed("train.sed=1", 'train.sed: unknown key; did you mean "seed"?'),
    "below a number": typed("optimizer.lr.x=1", 'optimizer.lr: expected a number > 0, got {"x": 1}'),
    "several": Wrong(
        [
            'recipe.yaml:12:28: optimizer.lr: expected a number > 0, got "fast"',
            'recipe.yaml:12:34: optimizer.momentun: unknown key; did you mean "momentum"?',
            'command line: optimizr: unknown key; did you mean "optimizer"?',
            "command line: train.seed: expected a whole number ≥ 0 and < 9223372036854775808, got -1",
        ],
        ("lr: 0.1, momentum", "lr: fast, momentun"),
        ("train.seed=-1", "optimizr.lr=1"),
    ),
}


def test_the_recipe_itself_is_right(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert validate(load(str(tmp_path / "recipe.yaml"))).recipe.optimizer.lr == 0.1


@pytest.mark.usefixtures("shipped_names")
@pytest.mark.parametrize("case", WRONG)
def test_the_lines_printed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(WRONG[case].text)
    with pytest.raises(RecipeError) as refusal:
        validate(load("recipe.yaml", WRONG[case].overrides))
    assert_lines(refusal.value.problems, WRONG[case].lines)


def assert_lines(found: list[str], expected: list[str]) -> None:
    """Each line begins as expected: place, key, what was found and expected; advice may follow."""
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("command", "case"),
    [("check", "several"), ("train", "index"), ("show", "tag"), ("eval", "name misspelt")],
)
def test_the_command_says_the_same_and_does_nothing(command: str, case: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(WRONG[case].text)
    result = run(tmp_path, "-m", "paceline", command, "recipe.yaml", *WRONG[case].overrides)
    assert_lines(result.stderr.splitlines(), WRONG[case].lines)
    assert result.stdout == ""
    assert result.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("command", ["check", "train"])
def test_no_command_imports_torch_for_a_wrong_recipe(command: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(WRONG["several"].text)
    code = (
        "import sys\n"
        "from paceline.cli import main\n"
        f"assert main(['{command}', 'recipe.yaml']) == 2\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    result = run(tmp_path, "-c", code)
    assert (result.returncode, result.stderr.splitlines()) == (0, WRONG["several"].lines[:2])


def test_a_recipe_that_does_not_exist(tmp_path: Path) -> None:
    result = run(tmp_path, "-m", "paceline", "train", "quikstart")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith('did you mean "quickstart"?\n')
    assert list(tmp_path.iterdir()) == []


_KEYS = ["name", "task", "model", "data", "data.train", "data.train.transforms", "data.train.transforms.0", "losses"]
_KEYS += ["losses.0", "losses.0.name", "optimizer", "optimizer.name", "schedule.decay", "train", "expect", "evaluate"]
_VALUES = [
    "null",
    "[]",
    "{}",
    "[[1]]",
    "{name: {}}",
    "{dataset: [x]}",
    ".inf",
    "true",
    "random_horizontal_flip",
    "{decay: sgd}",
    "[{}]",
]
_VALUES += [
    "{extends: x}",
    "{name: sgd, '': 1}",
    "[random_horizontal_flip, {name: resize, size: [1, x]}]",
    "{args: {a: {b: .nan}}}",
]
_BELOW = ["", ".0", ".x", ".name"]


@given(st.lists(st.tuples(st.sampled_from(_KEYS), st.sampled_from(_BELOW), st.sampled_from(_VALUES))))
@settings(deadline=None, max_examples=40)
def test_any_change_is_accepted_or_refused_in_lines(changes: list[tuple[str, str, str]]) -> None:
    overrides = [f"{key}{below}={value}" for key, below, value in changes]
    try:
        outcome = list(validate(load("quickstart", overrides)).resolved())
    except RecipeError as refusal:
        outcome = refusal.problems
    assert outcome
    assert all(line and "\n" not in line for line in outcome)
