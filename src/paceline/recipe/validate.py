"""Check a recipe against the schema and the registry, without importing torch."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from paceline.core.arguments import Arguments
from paceline.core.errors import RecipeError
from paceline.core.registry import KINDS, SUPPLIED, Entry, register
from paceline.recipe.document import COMMAND_LINE, Document, Origin, children, lookup, places
from paceline.recipe.incompatible import cross_checks
from paceline.recipe.parts import DATASETS, PARTS, SEVERAL, PartSpec
from paceline.recipe.problems import Problem, expected_names, own_parts, problems_of, show, unknown_name
from paceline.recipe.schema import Recipe
from paceline.recipe.yaml_tree import KeyPath, dotted

DEFAULT = Origin("default")


@dataclass(frozen=True)
class CheckedRecipe:
    """A valid recipe; `model_extra` of each part holds all of its arguments, defaults included."""

    recipe: Recipe
    document: Document
    notes: Sequence[str] = ()
    """What the command line changed beyond what it says, for the user."""

    def _path(self, key: str) -> KeyPath:
        return _path_of(key, self.document.tree)

    def origin(self, key: str) -> Origin:
        """The origin of the value of a dotted key, or "default"."""
        return self.document.values.get(self._path(key), DEFAULT)

    def locate(self, key: str) -> str:
        """A dotted key after its place, for messages: `recipe.yaml:14:7: optimizer.lr`."""
        return f"{_nearest_origin(self.document, self._path(key))}: {key}"

    def resolved(self) -> dict[str, Any]:
        """The whole recipe as JSON values, with all defaults, in the order of the schema."""
        resolved: dict[str, Any] = self.recipe.model_dump(mode="json", fallback=str)
        return resolved


def validate(document: Document) -> CheckedRecipe:
    """Check everything that needs no building; raise all mistakes at once."""
    document = Document(copy.deepcopy(document.tree), dict(document.keys), dict(document.values))
    notes: list[str] = []
    problems = [*_not_finite(document), *_spread_fold(document)]
    arguments: dict[KeyPath, dict[str, Any]] = {}
    for part in PARTS:
        for path in part.places(document.tree):
            problems += _check_part(part, path, document, arguments, notes)
    try:
        recipe = Recipe.model_validate_json(_text(document.tree))
    except ValidationError as error:
        problems += problems_of(error, Recipe, document.tree, also_known=["extends"])
    if problems:
        raise _error(problems, document)
    recipe = _with_arguments(recipe, arguments)
    _drop_outdated_expectations(recipe, document)
    problems = [Problem(_path_of(keys[0], document.tree), message) for keys, message in cross_checks(recipe)]
    if problems:
        raise _error(problems, document)
    return CheckedRecipe(recipe, document, notes)


def _not_finite(document: Document) -> list[Problem]:
    numbers = ((path, lookup(document.tree, path)) for path in places(document.tree, ()))
    return [
        Problem(path, f"expected a finite number, got {show(value)}")
        for path, value in numbers
        if isinstance(value, float) and not math.isfinite(value)
    ]


def _spread_fold(document: Document) -> list[Problem]:
    """Give `data.fold` to each data set that takes a fold; the problems of those that were given another."""
    data = document.tree.get("data")
    fold = data.get("fold") if isinstance(data, dict) else None
    if not isinstance(data, dict) or fold is None:
        return []
    problems: list[Problem] = []
    origin, is_taken = document.values.get(("data", "fold"), DEFAULT), False
    splits = [(part, path) for part in DATASETS for path in part.places(document.tree)]
    for spec, path in splits:
        tree = lookup(document.tree, path)
        entry = _entry(spec, path, tree) if isinstance(tree, dict) else None
        if not isinstance(entry, Entry) or "fold" not in entry.arguments.model_fields:
            continue
        is_taken, place = True, (*path, "fold")
        if "fold" not in tree or document.values.get(place, DEFAULT).layer < origin.layer:
            tree["fold"] = fold
            document.keys[place] = document.values[place] = origin
        elif tree["fold"] != fold:
            problems.append(Problem(place, f"differs from data.fold, which is {show(fold)}; remove one of them"))
    if not is_taken:
        problems.append(Problem(("data", "fold"), "no data set of this recipe takes a fold"))
    document.forget(("data", "fold"))
    del data["fold"]
    return problems


def _check_part(
    part: PartSpec, path: KeyPath, document: Document, arguments: dict[KeyPath, dict[str, Any]], notes: list[str]
) -> list[Problem]:
    """The problems of a part's name and arguments; valid arguments are added to `arguments`."""
    tree = lookup(document.tree, path)
    if not isinstance(tree, dict):
        return []
    entry = _entry(part, path, tree)
    if isinstance(entry, Problem):
        return [entry]
    given = {key: value for key, value in tree.items() if key not in part.section.model_fields}
    for key in [key for key in given if key not in entry.arguments.model_fields]:
        if _is_left_over(part, path, key, document):
            notes += _left_over_notes(part, path, key, document)
            document.forget((*path, key))
            del tree[key], given[key]
    try:
        checked = _validated(entry.arguments, given)
    except ValidationError as error:
        found = problems_of(error, entry.arguments, given, also_known=part.section.model_fields)
        return [Problem((*path, *each.path), each.message + _supplied(part.kind, each), each.about) for each in found]
    arguments[path] = checked
    return []


def _supplied(kind: str, problem: Problem) -> str:
    """The hint for a missing argument that the builder gives under another name, such as n_classes."""
    meant = get_close_matches(str(problem.path[-1]), SUPPLIED.get(kind, ()), 1) if problem.about == "absence" else []
    return f"; did you mean the argument {meant[0]}, which every {kind} may ask for?" if meant else ""


def _entry(part: PartSpec, path: KeyPath, tree: dict[str, Any]) -> Entry | Problem:
    registry = register.kind(part.kind)
    inner = (*path, part.name_key)
    field = part.section.model_fields[part.name_key]
    if part.name_key not in tree and field.is_required():
        return Problem(inner, f"required, but missing; expected {expected_names(registry.names())}", "absence")
    name = tree.get(part.name_key, field.default)
    if not isinstance(name, str):
        return Problem(inner, f"expected {expected_names(registry.names())}, got {show(name)}")
    if found := registry.find(name):
        return found
    own = {kind: register.kind(kind).own_names() for kind in KINDS}
    return Problem(inner, unknown_name(part.kind, name, registry.names(), own_parts(part.kind, own)))


def _is_left_over(part: PartSpec, path: KeyPath, key: str, document: Document) -> bool:
    """Whether an argument belongs to another name, which a later recipe or the command line replaced."""
    name = document.values.get((*path, part.name_key))
    inside = list(places(lookup(document.tree, (*path, key)), (*path, key)))
    origins = [table[place] for table in (document.keys, document.values) for place in inside if place in table]
    return name is not None and name.layer > max(origin.layer for origin in origins)


def _left_over_notes(part: PartSpec, path: KeyPath, key: str, document: Document) -> list[str]:
    """The note on an argument that is dropped because the command line names another part; none for recipes."""
    name = (*path, part.name_key)
    if document.values[name].source != COMMAND_LINE:
        return []
    place, chosen = (*path, key), lookup(document.tree, name)
    origin = document.keys.get(place) or _nearest_origin(document, place)
    return [f"{origin}: {dotted(place)}: dropped, since {dotted(name)}={chosen} takes no such key"]


def _drop_outdated_expectations(recipe: Recipe, document: Document) -> None:
    """Drop each `expect` that was written for another length: `train.epochs=1` cannot reach what nine epochs do."""
    length = max(document.values.get(("train", unit), DEFAULT).layer for unit in ("epochs", "steps"))
    # A key's layer is that of the file which wrote it last, even if it repeats a value.
    for metric in [name for name in recipe.expect if document.keys.get(("expect", name), DEFAULT).layer < length]:
        document.forget(("expect", metric))
        del recipe.expect[metric], document.tree["expect"][metric]


def _with_arguments(recipe: Recipe, arguments: dict[KeyPath, dict[str, Any]]) -> Recipe:
    """The recipe with validated arguments in all parts, also those it leaves out."""
    recipe = recipe.model_copy(deep=True)  # default sections are shared between recipes
    for part in PARTS:
        for path, section in _instances(recipe, part.pattern):
            extra = section.model_extra
            assert extra is not None
            if path not in arguments:
                entry = register.kind(part.kind).find(getattr(section, part.name_key))
                assert entry is not None
                arguments[path] = _validated(entry.arguments, extra)
            extra.clear()
            extra.update(arguments[path])
    return recipe


def _instances(recipe: Recipe, pattern: tuple[str, ...]) -> list[tuple[KeyPath, Arguments]]:
    found: list[tuple[KeyPath, Any]] = [((), recipe)]
    for segment in pattern:
        if segment == "*":
            found = [((*path, index), item) for path, items in found for index, item in enumerate(items)]
        else:
            key = segment.removesuffix(SEVERAL)
            found = [((*path, key), getattr(section, key)) for path, section in found]
        if segment.endswith(SEVERAL):
            found = [each for path, value in found for each in _named(path, value)]
        found = [(path, value) for path, value in found if value is not None]
    return found


def _named(path: KeyPath, value: Any) -> list[tuple[KeyPath, Any]]:
    """One part, or several by name."""
    return [((*path, name), part) for name, part in value.items()] if isinstance(value, dict) else [(path, value)]


def _validated(model: type[Arguments], given: dict[str, Any]) -> dict[str, Any]:
    return dict(model.model_validate_json(_text(given)))


def _text(tree: Any) -> str:
    # Strict validation of JSON text, unlike that of Python objects, takes a list where a tuple is declared.
    return json.dumps(tree)


def _error(problems: Sequence[Problem], document: Document) -> RecipeError:
    """The first problem of each place, ordered by file, line and column."""
    first: dict[KeyPath, Problem] = {}
    for problem in problems:
        first.setdefault(problem.path, problem)
    located = [(_origin(problem, document), problem) for problem in first.values()]
    located.sort(key=_order)
    return RecipeError([_line(origin, problem) for origin, problem in located])


def _order(located: tuple[Origin, Problem]) -> tuple[bool, str, int, int, str]:
    origin, problem = located
    if origin.source == COMMAND_LINE:
        return True, "", 0, 0, dotted(problem.path)
    return False, origin.source, origin.line or 0, origin.column or 0, ""


def _line(origin: Origin, problem: Problem) -> str:
    key = f"{dotted(problem.path)}: " if problem.path else ""
    message = " ".join(problem.message.splitlines())  # a user's own check may raise anything
    return f"{origin}: {key}{message}"


def _origin(problem: Problem, document: Document) -> Origin:
    if problem.about == "key":
        return document.keys.get(problem.path) or _nearest_origin(document, problem.path)
    return _nearest_origin(document, problem.path)


def _nearest_origin(document: Document, path: KeyPath) -> Origin:
    """The origin of a value; if it is absent, that of the nearest key above."""
    if path in document.values:
        return document.values[path]
    for end in range(len(path) - 1, -1, -1):
        found = document.keys.get(path[:end]) or document.values.get(path[:end])
        if found:
            return found
    return DEFAULT


def _path_of(key: str, tree: Any) -> KeyPath:
    """The place of a dotted key, present or not; numbers are indices into lists."""
    path: KeyPath = ()
    for segment in key.split("."):
        is_index = isinstance(tree, list) and segment.isdecimal()
        path = (*path, int(segment) if is_index else segment)
        tree = dict(children(tree)).get(path[-1])
    return path
