"""Recipes that nobody would write: those that ship, changed at random in structure, in text and by overrides.

Each must be accepted or refused in whole lines; nothing may be raised otherwise, and no file may appear.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from chaos.row import Row
from paceline.core.errors import RecipeError, UsageError
from paceline.recipe.json_schema import json_schema
from paceline.recipe.load import load, shipped_recipes
from paceline.recipe.resolved import recipe_lines
from paceline.recipe.validate import validate

FULL, QUICK = 20_000, 400
CANARY = "executed"

Tree = Any
Place = tuple[Any, ...]


class Case(NamedTuple):
    """A recipe's file name and content, and what the command line adds."""

    name: str
    content: bytes
    overrides: list[str]


def _trees() -> list[Tree]:
    """The recipes that ship, and all that they say when nothing is left to defaults."""
    found = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in shipped_recipes().values()]
    return [*found, *(validate(load(name)).resolved() for name in shipped_recipes())]


def _known_keys() -> list[str]:
    """Every key that the schema knows."""
    names: set[str] = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            names.update(node.get("properties", {}))
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            collect(inner)

    collect(json_schema())
    return sorted(names | {"extends"})


_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_TREES = _trees()
_KEYS = _known_keys()
_WORDS = [
    "", " ", "auto", "none", "null", "true", "cosine", "sgd", "quickstart", "fashion", "timm/resnet18", "timm/",
    "all_but_head", "re:(", "re:(a+)+$", "*", "**", "[", "${HOME}", "$(touch executed)", "`touch executed`", "../..",
    "/etc/passwd", "~", "~nobody-at-all/x", "os:system", "paceline.cli:main", "__class__", "{0.__class__}", "%s%n",
    "a\0b", "\ud800", "\udcff", "\u202e", "\ufeff", "ß", "İ", "١٢", "１", "1_000", "0x1F", "0o17", "1e400", "1e-400",
    ".nan", "-.inf", "2020-01-01", "1:30", "<<", "=", "a.b.c", "0", "-1", "999999999999999999999", "x" * 500, "9" * 70,
    "\n", "\t", "\r\n", "\x85", "\x1b[31m",
]  # fmt: skip
_NUMBERS = [
    0, -1, 1, 2, 3, 100, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5,
    1e-320, 1e308, float("inf"), float("-inf"), float("nan"), 5e-324,
]  # fmt: skip
_SNIPPETS = [
    "!!python/object/apply:os.system ['touch executed']", "!!python/name:os.system", "!!binary aGk=", "!!set {a}",
    "!!timestamp 2020-01-01", "!custom x", "&a [*a, *a]", "&x {a: *x}", "*nothing", "<<: {a: 1}", "? [a, b]\n: c",
    "---\n", "...\n", "%YAML 9.9\n---\n", "{", "}", "[", "]", ":", "- ", "|\n  text", ">\n  text", '"', "'", "\t", "#",
    "\x00", "\ufeff", "\ud83d", "\u2028", "{{{{{{{{", "[" * 40, "- " * 40, "a: " * 40, ",", "@", "`", "%", "\\", "~: 1",
    "NaN", "Infinity", "1e999", "0b1", "name: again\n", "extends: quickstart\n", "extends: [recipe.yaml]\n",
    "extends: ../../../../etc/passwd\n", "extends: /dev/zero\n", "extends: {a: 1}\n", "extends: [[]]\n",
]  # fmt: skip

_scalars = st.one_of(
    st.sampled_from([None, True, False]),
    st.sampled_from(_NUMBERS),
    st.sampled_from(_WORDS),
    st.sampled_from(_KEYS),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
_keys = st.one_of(st.sampled_from(_KEYS), st.sampled_from(_WORDS), st.text(max_size=4))
_values: st.SearchStrategy[Any] = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3), max_leaves=5
)
_deep = st.sampled_from([8, 31, 32, 33, 200, 3000])
_spots = st.integers(0, 10_000)


def _places(tree: Tree, path: Place = ()) -> list[Place]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in inner for place in _places(value, (*path, key)))]


def _at(tree: Tree, path: Place) -> Tree:
    for segment in path:
        tree = tree[segment]
    return tree


def _changed(tree: Tree, path: Place, change: Callable[[Tree, Any], None]) -> Tree:
    """A copy of the tree with its value at a place changed inside the container that holds it."""
    top = {"": json.loads(json.dumps(tree))}
    path = ("", *path)
    change(_at(top, path[:-1]), path[-1])
    return top[""]


@st.composite
def _mutations(draw: st.DrawFn, tree: Tree) -> Tree:
    places = _places(tree)
    path = places[draw(_spots) % len(places)]
    is_deep = draw(st.integers(0, 29)) == 29
    kind = (
        "deep"
        if is_deep
        else draw(st.sampled_from(["replace", "replace", "remove", "rename", "add", "add", "wrap", "move", "move"]))
    )

    def change(holder: Tree, key: Any) -> None:
        value = holder[key]
        if kind == "replace":
            holder[key] = draw(_values)
        elif kind == "remove" and path:
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict) and path:
            holder[draw(_keys)] = holder.pop(key)
        elif kind == "add" and isinstance(value, dict):
            value[draw(_keys)] = draw(_values)
        elif kind == "add" and isinstance(value, list):
            value.insert(draw(_spots) % (len(value) + 1), draw(_values))
        elif kind == "move":
            holder[key] = json.loads(json.dumps(_at(tree, places[draw(_spots) % len(places)])))
        elif kind == "deep":
            for level in range(draw(_deep)):
                value = [value] if level % 2 else {"a": value}
            holder[key] = value
        else:
            holder[key] = [value] if draw(st.booleans()) else {draw(_keys): value}

    return _changed(tree, path, change)


@st.composite
def _texts(draw: st.DrawFn, text: str) -> str:
    """The text after an accident: cut off, with something in the middle, a part missing or doubled."""
    start = draw(_spots) % (len(text) + 1)
    stop = min(len(text), start + draw(st.integers(0, 40)))
    kind = draw(st.sampled_from(["cut", "insert", "insert", "line", "remove", "double", "swap"]))
    line = text.rfind("\n", 0, start) + 1
    if kind == "cut":
        return text[:start]
    if kind == "insert":
        return text[:start] + draw(st.sampled_from(_SNIPPETS)) + text[start:]
    if kind == "line":
        return text[:line] + draw(st.sampled_from(_SNIPPETS)) + "\n" + text[line:]
    if kind == "remove":
        return text[:start] + text[stop:]
    if kind == "double":
        return text[:stop] + text[start:]
    return text[:start] + draw(st.characters()) + text[start + 1 :]


def _written(tree: Tree, is_json: bool) -> str:
    with suppress(RecursionError, ValueError, yaml.YAMLError):
        return json.dumps(tree) if is_json else yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return "[" * 5000


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A recipe that ships after up to three changes, as YAML or JSON, whose text may be damaged, and overrides."""
    tree = draw(st.sampled_from(_TREES))
    with suppress(RecursionError):
        for _ in range(draw(st.integers(0, 3))):
            tree = draw(_mutations(tree))
    is_json = draw(st.booleans())
    text = _written(tree, is_json)
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
        text = draw(_texts(text))
    content = text.encode("utf-8", draw(st.sampled_from(["replace", "surrogatepass"])))
    if draw(st.integers(0, 19)) == 19:
        spot = draw(_spots) % (len(content) + 1)
        content = content[:spot] + draw(st.binary(max_size=4)) + content[spot:]
    name = "recipe" + (".json" if is_json != (draw(st.integers(0, 19)) == 19) else ".yaml")
    return Case(name, content, [draw(_overrides()) for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2])))])


@st.composite
def _overrides(draw: st.DrawFn) -> str:
    places = [path for path in _places(draw(st.sampled_from(_TREES))) if path]
    path = [str(segment) for segment in places[draw(_spots) % len(places)]]
    if draw(st.booleans()):
        path = [*path[: draw(st.integers(0, 3))], draw(_keys)]
    value = draw(st.sampled_from([*_WORDS, *_SNIPPETS]) | _values.map(lambda value: _written(value, is_json=True)))
    key = draw(st.sampled_from([".".join(path), draw(_keys)]))
    return f"{key}{draw(st.sampled_from([*'=====', '']))}{value}"


def judge(case: Case, folder: Path) -> str:
    """What became of a recipe: "accepted" or "refused"; anything else that happens is raised."""
    path = folder / case.name
    path.write_bytes(case.content)
    try:
        outcome = _read(path, case.overrides)
    finally:
        path.unlink()
    left = sorted(each.name for each in folder.iterdir())
    assert left == [], f"files were made: {left}"
    return outcome


def _read(path: Path, overrides: list[str]) -> str:
    try:
        checked = validate(load(str(path), overrides))
    except (RecipeError, UsageError) as refusal:
        lines = refusal.problems if isinstance(refusal, RecipeError) else [str(refusal)]
        assert lines, "refused without a reason"
        assert all(line.strip() and len(line.splitlines()) == 1 for line in lines), f"not in whole lines: {lines}"
        return "refused"
    # What is accepted can be written down, and means the same when it is read again.
    resolved = checked.resolved()
    text = "\n".join(recipe_lines(resolved, checked)) + "\n"
    again = path.with_name("again.yaml")
    again.write_text(text, encoding="utf-8")
    try:
        assert validate(load(str(again))).resolved() == resolved, "written down, it means something else"
    finally:
        again.unlink()
    return "accepted"


def fuzz(number: int, key: int) -> Counter[str]:
    """Judge so many cases; the same ones for the same key. The first that goes wrong is raised, made small."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as name:

        @seed(key)
        @settings(
            max_examples=number,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases())
        def check(case: Case) -> None:
            outcomes[judge(case, Path(name))] += 1

        check()
    return outcomes


def run(quick: bool) -> list[Row]:
    """The long form."""
    number = QUICK if quick else FULL
    outcomes, problem = Counter[str](), ""
    try:
        outcomes = fuzz(number, key=5)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        problem = f"; {type(error).__name__}: {error}"
    cases_done = sum(outcomes.values())
    measured = f"{cases_done:,} cases: {outcomes['refused']:,} refused, {outcomes['accepted']:,} accepted{problem}"
    goal = f"{number:,} cases, 0 tracebacks, 0 files"
    return [Row("recipes changed at random", goal, measured, not problem and cases_done >= number)]
