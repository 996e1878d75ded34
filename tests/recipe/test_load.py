"""Files, what they extend, and overrides, merged into one document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import RecipeError, UsageError
from paceline.recipe.document import Document, Origin, places
from paceline.recipe.load import expand_shorthand, load, merge, shipped_recipes

Write = Callable[..., None]
NEITHER = "is neither a file nor a shipped recipe"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files into the current folder, which is a new one: `write(r="a: 1")` makes r.yaml."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            path = Path(name.replace("__", "/") + ".yaml")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    return write


def problems(*arguments: Any) -> list[str]:
    with pytest.raises(RecipeError) as refusal:
        load(*arguments)
    return refusal.value.problems


def test_extends_merges_mappings_and_replaces_the_rest(write: Write) -> None:
    write(
        base="a: {x: 1, y: {z: 2}}\nlist: [1, 2, 3]\nmapping: {k: 1}\n",
        r="extends: base.yaml\na: {y: {w: 3}, x: 4}\nlist: [9]\nmapping: off\n",
    )
    document = load("r.yaml")
    assert document.tree == {"a": {"x": 4, "y": {"z": 2, "w": 3}}, "list": [9], "mapping": "off"}
    assert str(document.values["a", "x"]) == "r.yaml:2:19"
    assert str(document.values["a", "y", "z"]) == "base.yaml:1:18"
    assert str(document.keys["a", "y"]) == "r.yaml:2:5"
    assert str(document.values[()]) == "r.yaml:1:1"
    assert ("list", 1) not in document.values
    assert ("mapping", "k") not in document.keys
    assert ("extends",) not in document.values


def test_later_bases_win_and_layers_rise(write: Write) -> None:
    write(one="a: 1\nb: 1\nc: 1\n", two="b: 2\nc: 2\n", r="extends: [one.yaml, two.yaml]\nc: 3\n")
    document = load("r.yaml", ["d=4", "e=5"])
    assert document.tree == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}
    assert [document.values[key,].layer for key in "abcde"] == [0, 1, 2, 3, 3]


def test_extends_is_relative_to_the_file_that_says_it(write: Write) -> None:
    write(recipes__deep="a: 1\n", recipes__base="extends: deep.yaml\nb: 2\n", r="extends: recipes/base.yaml\n")
    document = load("r.yaml")
    assert document.tree == {"a": 1, "b": 2}
    assert str(document.values["a",]) == "recipes/deep.yaml:1:4"


def test_extends_a_shipped_recipe(write: Write) -> None:
    write(r="extends: quickstart\ntrain: {epochs: 1}\n")
    document = load("r.yaml")
    assert document.tree["train"]["epochs"] == 1
    assert document.tree["task"] == {"name": "classification"}
    assert document.values["task",].source == "paceline/recipes/classification/quickstart.yaml"


def test_the_same_value_given_again_keeps_its_layer(write: Write) -> None:
    write(base="optimizer: {name: sgd, lr: 1}\n", r="extends: base.yaml\noptimizer: {name: sgd, lr: 2}\n")
    values = load("r.yaml").values
    assert values["optimizer", "name"] == Origin("r.yaml", 2, 19, layer=0)
    assert values["optimizer", "lr"] == Origin("r.yaml", 2, 28, layer=1)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"r": "extends: r.yaml\n"}, ["r.yaml:1:10: extends: r.yaml extends itself, directly or through others"]),
        (
            {"r": "extends: a.yaml\n", "a": "x: 1\nextends: [r.yaml]\n"},
            ["a.yaml:2:11: extends: r.yaml extends itself, directly or through others"],
        ),
        ({"r": "extends: 3\n"}, ["r.yaml:1:10: extends: expected the name of a recipe or a list of names"]),
        (
            {"r": "extends:\n  - gone.yaml\n  - quikstart\n"},
            [
                f'r.yaml:2:5: extends: "gone.yaml" {NEITHER}; `paceline recipes` lists the shipped ones',
                f'r.yaml:3:5: extends: "quikstart" {NEITHER}; did you mean "quickstart"?',
            ],
        ),
        (
            {"r": "extends: [a.yaml, b.yaml]\n", "a": "x: 1\nx: 2\n", "b": "- 1\n"},
            [
                "a.yaml:2:1: x: given twice; first at 1:1",
                "b.yaml:1:1: a recipe is a mapping of keys to values, got a list",
            ],
        ),
        (
            {"r": 'extends: "a\\0.yaml"\n'},
            [f'r.yaml:1:10: extends: "a\\u0000.yaml" {NEITHER}; `paceline recipes` lists the shipped ones'],
        ),
    ],
)
def test_refused_extends(files: dict[str, str], expected: list[str], write: Write) -> None:
    write(**files)
    assert problems("r.yaml") == expected


def test_chains_are_limited(write: Write) -> None:
    write(**{f"r{n}": f"extends: r{n + 1}.yaml\n" for n in range(8)}, r8="a: 1\n", r9="a: 1\n")
    assert load("r0.yaml").tree == {"a": 1}
    write(r8="extends: r9.yaml\n")
    assert problems("r0.yaml") == ["r8.yaml:1:10: extends: more than 8 recipes extend one another"]


def test_fans_are_limited(write: Write) -> None:
    fan = "extends: [{}]\n".format(", ".join(["{0}"] * 9))
    write(r=fan.format("a.yaml"), a=fan.format("b.yaml"), b=fan.format("c.yaml"), c="x: 1\n")
    assert any(line.endswith("more than 64 files are read for one recipe") for line in problems("r.yaml"))


def test_overrides(write: Write) -> None:
    write(r="a: {b: 1}\nlist: [{w: 1}, {w: 2}]\ntext: x\n")
    overrides = ["a.b=1e-3", "a.c=off", "list.1.w=[5, 6]", "new.deep.key={k: null}", "text.below=1", " spaced =2"]
    document = load("r.yaml", overrides)
    assert document.tree == {
        "a": {"b": 0.001, "c": "off"},
        "list": [{"w": 1}, {"w": [5, 6]}],
        "text": {"below": 1},
        "new": {"deep": {"key": {"k": None}}},
        "spaced": 2,
    }
    assert str(document.values["a", "b"]) == "command line"
    assert str(document.keys["a", "b"]) == "command line"
    assert str(document.values["a",]) == "r.yaml:1:4"
    assert str(document.values["list", 1]) == "r.yaml:2:16"
    assert str(document.values["new",]) == "command line"
    assert set(places(document.tree, ())) == set(document.values)


def test_an_override_of_a_mapping_is_merged_into_it(write: Write) -> None:
    write(r="a: {b: 1, c: 2}\n")
    assert load("r.yaml", ["a={c: 3}"]).tree == {"a": {"b": 1, "c": 3}}


def test_an_empty_mapping_empties_what_is_inherited(write: Write) -> None:
    write(base="a: {x: {y: 1}, z: 2}\nb: {c: 1}\n", r="extends: base.yaml\na: {x: {}}\n", same="extends: base.yaml\n")
    document = load("r.yaml", ["b={}"])
    assert document.tree == {"a": {"x": {}, "z": 2}, "b": {}}
    assert str(document.values["a", "x"]) == "r.yaml:2:8"
    assert ("a", "x", "y") not in document.keys
    assert load("same.yaml", ["b.c=2", "a={}"]).tree == {"a": {}, "b": {"c": 2}}


def test_the_last_override_wins(write: Write) -> None:
    write(r="a: 0\n")
    assert load("r.yaml", ["a=1", "a=2"]).tree == {"a": 2}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("list.2=1", "command line: list.2=1: list has 2 items, counted from 0; got 2"),
        ("list.x=1", "command line: list.x=1: list has 2 items, counted from 0; got x"),
        ("list.-1=1", "command line: list.-1=1: list has 2 items, counted from 0; got -1"),
        ("a=!x 1", "command line: a=!x 1: tag !x is not allowed; a recipe holds plain values only"),
        ("a=*b", "command line: a=*b: alias *b has no anchor &b before it"),
        ("extends=x", "command line: extends=x: extends is only allowed in a file"),
    ],
)
def test_refused_overrides(override: str, expected: str, write: Write) -> None:
    write(r="list: [1, 2]\n")
    assert problems("r.yaml", [override, "ok=1"]) == [expected]


def test_an_override_that_is_not_yaml_is_named_as_typed(write: Write) -> None:
    write(r="a: 1\n")
    (line,) = problems("r.yaml", ["a=[1, 2"])
    assert line.startswith("command line: a=[1, 2: not valid YAML: ")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("a", '"a": expected key=value'),
        ("=1", '"=1": the key before = is empty'),
        ("a..b=1", '"a..b=1": the key before = is empty or has an empty part'),
        (".".join("a" * 33) + "=1", "more than 32 parts"),
    ],
)
def test_malformed_overrides(override: str, words: str, write: Write) -> None:
    write(r="a: 1\n")
    with pytest.raises(UsageError) as refusal:
        load("r.yaml", [override])
    assert words in str(refusal.value)


def test_shorthand_is_expanded_in_every_layer(write: Write) -> None:
    write(
        base="model: timm/resnet18\nlosses: [cross_entropy, bce]\ndata: {train: idx}\nschedule: cosine\n",
        r="extends: base.yaml\nmodel: {weights: w.pth}\n",
    )
    document = load("r.yaml", ["losses.1.weight=0.5", "losses.0=bce", "schedule=linear", "data.train.root=here"])
    assert document.tree == {
        "model": {"name": "timm/resnet18", "weights": "w.pth"},
        "losses": [{"name": "bce"}, {"name": "bce", "weight": 0.5}],
        "data": {"train": {"dataset": "idx", "root": "here"}},
        "schedule": {"decay": "linear"},
    }
    assert str(document.values["model", "name"]) == str(document.keys["model", "name"]) == "base.yaml:1:8"
    assert str(document.values["losses", 1, "name"]) == "base.yaml:2:25"
    assert str(document.values["losses", 0, "name"]) == "command line"


def test_shorthand_leaves_alone_what_is_not_a_name() -> None:
    tree = {"losses": "cross_entropy", "model": 5, "task": None, "data": [1]}
    document = Document(tree, {}, {(): Origin("x"), ("losses",): Origin("x")})
    expand_shorthand(document)
    assert document.tree == {"losses": "cross_entropy", "model": 5, "task": None, "data": [1]}


def test_shipped_recipes() -> None:
    shipped = shipped_recipes()
    assert list(shipped) == sorted(shipped)
    assert shipped["quickstart"].name == "quickstart.yaml"
    assert load("quickstart").tree == load("classification/quickstart").tree == load(str(shipped["quickstart"])).tree


def test_alike_shipped_names_get_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pose/small", "detection/small", "detection/large"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text("a: 1\n")
    monkeypatch.setattr("paceline.recipe.load._SHIPPED", tmp_path)
    assert list(shipped_recipes()) == ["detection/small", "large", "pose/small"]
    assert load("detection/large").tree == {"a": 1}


def test_a_file_comes_before_a_shipped_recipe_but_a_folder_does_not(write: Write) -> None:
    Path("quickstart").mkdir()
    assert load("quickstart").tree["name"] == "quickstart"
    write(quickstart="name: mine\n")
    assert load("quickstart.yaml").tree == {"name": "mine"}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("quickstrat", f'"quickstrat" {NEITHER}; did you mean "quickstart"?'),
        ("x" * 300 + ".yaml", f"{NEITHER}; `paceline recipes` lists the shipped ones"),
        ("notes.txt", "notes.txt: expected a .yaml, .yml or .json file"),
    ],
)
def test_unknown_references(reference: str, expected: str, write: Write) -> None:
    Path("notes.txt").write_text("a: 1\n")
    with pytest.raises(UsageError) as refusal:
        load(reference)
    assert str(refusal.value).endswith(expected)


def test_json_and_yaml_extend_each_other(write: Write) -> None:
    write(base="a: {x: 1}\n")
    Path("r.json").write_text('{"extends": "base.yaml", "a": {"y": 2}}')
    assert load("r.json").tree == {"a": {"x": 1, "y": 2}}


_KEYS = st.sampled_from("abc")
_TREES = st.dictionaries(
    _KEYS,
    st.recursive(
        st.integers() | st.lists(st.integers(), max_size=2), lambda x: st.dictionaries(_KEYS, x), max_leaves=6
    ),
)


def _document(tree: Any, source: str, layer: int) -> Document:
    origin = Origin(source, 1, 1, layer)
    every = dict.fromkeys(places(tree, ()), origin)
    return Document(tree, {path: origin for path in every if path and isinstance(path[-1], str)}, every)


def _plainly_merged(old: Any, new: Any, is_root: bool = False) -> Any:
    if isinstance(old, dict) and isinstance(new, dict) and (new or is_root):
        return {key: _plainly_merged(old.get(key), new[key]) if key in new else old[key] for key in [*old, *new]}
    return new


@given(_TREES, _TREES)
@settings(deadline=None)
def test_merging_keeps_one_origin_for_each_value(below: Any, above: Any) -> None:
    merged = merge(_document(below, "below", 0), _document(above, "above", 1))
    assert merged.tree == _plainly_merged(below, above, is_root=True)
    assert set(merged.values) == set(places(merged.tree, ()))
    assert set(merged.keys) == {path for path in merged.values if path and isinstance(path[-1], str)}
    given_above = set(places(above, ()))
    assert all((origin.source == "above") == (path in given_above) for path, origin in merged.values.items())
