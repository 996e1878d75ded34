"""The schema for editors accepts what the package accepts, and refuses what it refuses except for missing keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from paceline.recipe.document import read_document
from paceline.recipe.json_schema import json_schema
from paceline.recipe.load import shipped_recipes

VALID: dict[str, Any] = {
    "name": "fashion",
    "task": "classification",
    "model": {"name": "timm/resnet18.a1_in1k", "weights": None, "args": {"drop_rate": 0.1}},
    "data": {
        "batch_size": 128,
        "train": {
            "dataset": "idx",
            "root": "d",
            "split": "train",
            "transforms": ["random_horizontal_flip", {"name": "resize", "size": 3}],
        },
        "val": {"dataset": "idx", "root": "d", "split": "test"},
    },
    "losses": ["cross_entropy", {"name": "bce", "weight": 0.5}],
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "train": {"epochs": 20, "micro_batch_size": "auto"},
    "expect": {"top1": 0.9},
}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema)))


def changed(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of the tree with one dotted key set."""
    copy: dict[str, Any] = json.loads(json.dumps(tree))
    *path, last = [int(segment) if segment.isdecimal() else segment for segment in key.split(".")]
    inner: Any = copy
    for segment in path:
        inner = inner[segment]
    inner[last] = value
    return copy


def errors(validator: jsonschema.Draft202012Validator, tree: Any) -> list[str]:
    return [error.message for error in validator.iter_errors(tree)]


def test_valid_recipes_pass(validator: jsonschema.Draft202012Validator) -> None:
    assert errors(validator, VALID) == []
    shipped = {name: read_document(path).tree for name, path in shipped_recipes().items()}
    assert shipped
    assert [(name, error) for name, tree in shipped.items() for error in errors(validator, tree)] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", {"name": "classification", "top_k": [1]}),
        ("model", "convnet"),
        ("model", {"name": "convnet", "widths": [8]}),
        ("model", {"name": "torchvision/resnet50"}),
        ("schedule", "cosine"),
        ("schedule", {"decay": "linear", "floor": 0.1}),
        ("schedule", {"floor": 0.1}),
        ("data.val", None),
        ("data.train", {"dataset": "fashion_small", "split": "train"}),
        ("optimizer", {"name": "adamw", "lr": 1, "betas": [0.9, 0.99]}),
        ("train.micro_batch_size", 8),
        ("evaluate", {"metrics": ["auroc", {"name": "top_k", "k": [1]}]}),
        (
            "data.test",
            {"a": {"dataset": "idx", "root": "d", "split": "test"}, "b-2": {"dataset": "packed", "file": "x"}},
        ),
    ],
)
def test_valid_changes_pass(key: str, value: Any, validator: jsonschema.Draft202012Validator) -> None:
    assert errors(validator, changed(VALID, key, value)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizr", {}),
        ("name", 5),
        ("name", "a b"),
        ("task", "classificaton"),
        ("model", "resnet18"),
        ("model", "timm/"),
        ("model.wieghts", None),
        ("model.widths", [8]),
        ("data.train.classes", []),
        ("data.train.transforms.0", "flop"),
        ("data.train.transforms.1.size", 0),
        ("data.train.transforms.1.p", 0.5),
        ("losses", "cross_entropy"),
        ("losses.1.weight", -1),
        ("losses.1.class_weights", None),
        ("optimizer.lr", "fast"),
        ("optimizer.momentum", 1),
        ("optimizer.betas", [0.9, 0.99]),
        ("schedule", "cosin"),
        ("schedule", {"decay": "cosine", "zzz": 1}),
        ("schedule", {"zzz": 1}),
        ("train.micro_batch_size", "fast"),
        ("expect.top1", "high"),
        ("evaluate", {"metrics": [{"name": "auroc", "k": [1]}]}),
        ("data.test", {"a b": {"dataset": "packed", "file": "x"}}),
    ],
)
def test_wrong_changes_fail(key: str, value: Any, validator: jsonschema.Draft202012Validator) -> None:
    assert not validator.is_valid(changed(VALID, key, value))


@pytest.mark.parametrize(
    "tree",
    [
        {"extends": "quickstart"},
        {"extends": ["a.yaml", "b.yaml"], "train": {"seed": 3}},
        {"extends": "quickstart", "optimizer": {"lr": 0.1, "momentum": 0.5}},
        {"extends": "quickstart", "optimizer": "sgd", "data": {"train": {"root": "x"}}},
        {"extends": "quickstart", "schedule": {"floor": 0.1}},
    ],
)
def test_what_extends_another_may_be_partial(tree: Any, validator: jsonschema.Draft202012Validator) -> None:
    assert errors(validator, tree) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"extends": 5},
        {"extends": "quickstart", "optimizr": {}},
        {"extends": "quickstart", "optimizer": {"zzz": 1}},
        {"extends": "quickstart", "optimizer": {"name": "adamw", "momentum": 0.5}},
        {"extends": "quickstart", "optimizer": {"lr": "fast"}},
        {"extends": "quickstart", "train": {"epoch": 3}},
        {"extends": "quickstart", "losses": ["bec"]},
    ],
)
def test_what_extends_another_is_held_to_the_rest(tree: Any, validator: jsonschema.Draft202012Validator) -> None:
    assert not validator.is_valid(tree)


def keys_of(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every property that a schema describes, with its place in it."""
    if isinstance(node, dict):
        for name, inner in node.get("properties", {}).items():
            yield f"{place}.{name}", inner
        for name, inner in node.items():
            yield from keys_of(inner, f"{place}/{name}")
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from keys_of(inner, f"{place}/{index}")


def test_every_key_has_a_sentence_and_all_of_it_is_small() -> None:
    schema = json_schema()
    sections = {name: node for name, node in schema["$defs"].items() if name[0].isupper()}
    keys = [(place, node) for place, node in keys_of(sections) if "/if" not in place and "/then" not in place]
    assert len(keys) > 100
    assert [place for place, node in keys if not node.get("description")] == []
    properties = schema["$defs"]["Train"]["properties"]
    assert (properties["seed"]["default"], properties["precision"]["default"]) == (0, "fp32")
    assert schema["$defs"]["transform.random_horizontal_flip"]["properties"]["p"]["default"] == 0.5
    assert len(json.dumps(schema)) < 200_000
