"""`optimizer.param_groups`: one list of presets, kinds and names, whose order does not matter."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.core.world import World
from paceline.recipe.build_context import BuildContext
from paceline.recipe.build_training import make_groups
from paceline.recipe.load import load
from paceline.recipe.validate import validate

RECIPE = {
    "name": "groups",
    "task": "classification",
    "model": "convnet",
    "data": {"batch_size": 8, "train": {"dataset": "fashion_small", "split": "test"}},
    "losses": ["cross_entropy"],
    "train": {"steps": 1},
}
ENTRIES = [
    {"preset": "pet"},  # names with bias: lr × 2, decay 0; group norm: decay 0
    {"kind": "bias", "lr_scale": 3},
    {"kind": "batch_norm", "weight_decay": 0.5},
    {"match": "stem", "lr_scale": 0.1, "weight_decay": 0.25},
    {"match": "*.weight", "kind": "norm", "lr_scale": 7},
]
# By hand, for lr_scale and decay: the kind's own values win over the preset's, factors of names multiply on top of
# them, and the last decay counts.
EXPECTED = {
    "stem.conv.weight": (0.1, 0.25),
    "stem.conv.bias": (2 * 3 * 0.1, 0.25),
    "stem.norm.weight": (0.1 * 7, 0.25),
    "stem.norm.bias": (2 * 0.1, 0.25),
    "body.weight": (1.0, 0.01),
    "body.bias": (2 * 3, 0.0),
    "norm.weight": (7.0, 0.5),
    "norm.bias": (2.0, 0.0),
    "group.weight": (7.0, 0.0),
    "group.bias": (2.0, 0.0),
}


def net() -> nn.Module:
    stem = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)))
    layers = OrderedDict(stem=stem, body=nn.Conv2d(4, 4, 3), norm=nn.BatchNorm2d(4), group=nn.GroupNorm(2, 4))
    return nn.Sequential(layers)


def context(folder: Path, optimizer: dict[str, object]) -> BuildContext:
    optimizer = {"name": "sgd", "lr": 0.1, "weight_decay": 0.01, **optimizer}
    (folder / "recipe.json").write_text(json.dumps({**RECIPE, "optimizer": optimizer}))
    return BuildContext(validate(load(str(folder / "recipe.json"))), World(0, 1, 0, torch.device("cpu")))


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::17])
def test_factors_multiply_and_the_last_decay_counts_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    groups = make_groups(context(tmp_path, {"param_groups": [ENTRIES[index] for index in order]}), net())
    found = {name: (group.lr_scale, group.weight_decay) for group in groups for name in group.names}
    assert found == {name: pytest.approx(pair) for name, pair in EXPECTED.items()}


def test_a_resolved_recipe_says_the_same_again(tmp_path: Path) -> None:
    first = context(tmp_path, {"param_groups": ENTRIES})
    (tmp_path / "resolved.json").write_text(json.dumps(first.resolved()))
    again = validate(load(str(tmp_path / "resolved.json"))).recipe.optimizer.param_groups
    assert again == first.recipe.optimizer.param_groups


@pytest.mark.parametrize(
    ("entries", "place"),
    [
        ([{"preset": "pet", "lr_scale": 2}], "param_groups.0"),
        ([{"lr_scale": 2}], "param_groups.0"),
        ([{"kind": "bias"}], "param_groups.0"),
        ([{"match": "stem"}], "param_groups.0"),
        ([{"kind": "bias", "lr_scale": 2}, {"kind": "bias", "weight_decay": 0}], "param_groups.1"),
        ([{"preset": "pets"}], "param_groups.0.preset"),
        ([{"kind": "batchnorm", "lr_scale": 2}], "param_groups.0.kind"),
    ],
)
def test_entries_that_say_nothing_or_too_much_are_refused(
    entries: list[dict[str, object]], place: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=rf"optimizer\.{place}: "):
        context(tmp_path, {"param_groups": entries})


def test_a_name_that_matches_nothing_is_named_by_its_place_in_the_list(tmp_path: Path) -> None:
    entries = [{"preset": "pet"}, {"match": "stem", "lr_scale": 2}, {"match": "stm", "lr_scale": 2}]
    with pytest.raises(RecipeError, match=r"optimizer\.param_groups\.2: .*stm.*stem"):
        make_groups(context(tmp_path, {"param_groups": entries}), net())
    with pytest.raises(RecipeError, match=r"optimizer\.param_groups\.1: .*backbone"):
        make_groups(context(tmp_path, {"param_groups": [{"preset": "pet"}, {"preset": "backbone_tenth"}]}), net())


@pytest.mark.parametrize("key", ["presets", "kinds", "rules"])
def test_former_keys_lead_to_the_list(key: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf'optimizer\.{key}: unknown key; did you mean "param_groups"'):
        context(tmp_path, {key: []})
