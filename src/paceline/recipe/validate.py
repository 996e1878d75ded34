"""Check a recipe against the schema and the registry, without importing torch."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from paceline.core.arguments import Arguments
from paceline.core.errors import RecipeError
from paceline.core.registry import KINDS, SUPPLIED, Entry, register
from paceline.core.text import pluralize
from paceline.recipe.document import COMMAND_LINE, Document, KeyPath, Origin, children, dotted, lookup, places
from paceline.recipe.incompatible import cross_checks
from paceline.recipe.parts import DATASETS, PARTS, PartSpec
from paceline.recipe.problems import Problem, expected_names, own_parts, problems_of, show, unknown_name
from paceline.recipe.schema import Recipe

DEFAULT = Origin("default")
_ENDLESS = re.compile(r"(\S{200})\S+")  # a value that a check repeats in full


@dataclass(frozen=True)
class CheckedRecipe:
    """A valid recipe; `model_extra` of each part holds all of its arguments, defaults included."""

    recipe: Recipe
    document: Document
    notes: Sequence[str] = ()
    """What was dropped because the name that it was for was replaced, for the user."""

    def _path(self, key: str) -> KeyPath:
        return _path_of(key, self.document.tree)

    def origin(self, key: str) -> Origin:
        """The origin of the value of a dotted key, or "default"."""
        return self.document.values.get(self._path(key), DEFAULT)

    def locate(self, key: str) -> str:
        """A dotted key after its place, for messages: `recipe.yaml:14:7: optimizer.lr`."""
        return f"{nearest_origin(self.document, self._path(key))}: {key}"

    def located(self, error: RecipeError) -> RecipeError:
        """The error with the place of each problem that begins with a key alone, such as `model: …`."""
        return RecipeError([self._located(problem) for problem in error.problems])

    def _located(self, problem: str) -> str:
        key = problem.partition(": ")[0]
        if key.partition(".")[0] not in Recipe.model_fields:
            return problem
        path = self._path(key)
        return f"{self.document.values.get((*path, 'name')) or nearest_origin(self.document, path)}: {problem}"

    def resolved(self) -> dict[str, Any]:
        """The whole recipe as JSON values, with all defaults, in the order of the schema."""
        resolved: dict[str, Any] = self.recipe.model_dump(mode="json", fallback=str)
        return resolved


def validate(document: Document) -> CheckedRecipe:
    """Check everything that needs no building; raise all mistakes at once."""
    document = Document(copy.deepcopy(document.tree), dict(document.keys), dict(document.values))
    notes = _fit_schedule(document)
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
        raise recipe_error(problems, document)
    recipe = _with_arguments(recipe, arguments)
    _drop_outdated_expectations(recipe, document)
    problems = [_incompatible(keys, message, document) for keys, message in cross_checks(recipe)]
    if problems:
        raise recipe_error(problems, document)
    return CheckedRecipe(recipe, document, notes)


def _incompatible(keys: Sequence[str], message: str, document: Document) -> Problem:
    """The problem at the first key; also where another is, if that was written later, as above what is extended."""
    first, *others = (_path_of(key, document.tree) for key in keys)
    layer = nearest_origin(document, first).layer
    later = [path for path in others if document.values.get(path, DEFAULT).layer > layer]
    return Problem(first, "; ".join([message, *(f"{dotted(path)}: {document.values[path]}" for path in later)]))


def _not_finite(document: Document) -> list[Problem]:
    numbers = ((path, lookup(document.tree, path)) for path in places(document.tree, ()))
    return [
        Problem(path, f"expected a finite number, got {show(value)}")
        for path, value in numbers
        if isinstance(value, float) and not math.isfinite(value)
    ]


def _fit_schedule(document: Document) -> list[str]:
    """Fit the recipe's schedule to a length that the command line gives, as `train.epochs=1`; a note on each change.

    Milestones that the run does not reach are left out, and a decay without any; a warm-up that fills the run takes
    half of it. Where the command line gives the length in another unit, only building finds out, and refuses.
    """
    schedule, train = document.tree.get("schedule"), document.tree.get("train")
    if not isinstance(schedule, dict) or not isinstance(train, dict):
        return []
    notes = []
    for unit in ("epochs", "steps"):
        given = document.values.get(("train", unit), DEFAULT)
        if given.source != COMMAND_LINE or not isinstance(train[unit], int):
            continue
        for key in sorted({f"milestone_{unit}", f"every_{unit}", f"warmup_{unit}"} & schedule.keys()):
            origin = document.values["schedule", key]
            fit = _shorten_warmup if key.startswith("warmup") else _drop_milestones
            if origin.source != COMMAND_LINE and (change := fit(document, schedule, key, train[unit], given)):
                end = pluralize(train[unit], unit.removesuffix("s"))
                notes.append(f"{origin}: schedule.{key}: {change}, since the run ends after {end}")
    return notes


def _shorten_warmup(document: Document, schedule: dict[str, Any], key: str, length: int, given: Origin) -> str:
    written, half = schedule[key], length / 2 if key == "warmup_epochs" else length // 2
    if not isinstance(written, int | float) or written < length or half <= 0:
        return ""
    schedule[key], document.values["schedule", key] = half, given
    return f"{show(written)} shortened to {show(half)}"


def _drop_milestones(document: Document, schedule: dict[str, Any], key: str, length: int, given: Origin) -> str:
    points = schedule[key] if isinstance(schedule[key], list) else [schedule[key]]
    if schedule.get("decay") not in ("step", "multi_step") or not all(isinstance(each, int | float) for each in points):
        return ""  # what is no number is refused later
    is_last_one_reached = schedule.get("count_from") == 1
    reached = [point for point in points if point < length or (point == length and is_last_one_reached)]
    if not reached:
        schedule["decay"] = "constant"  # as `schedule.decay=constant`, which drops the keys of the former decay
        document.values["schedule", "decay"] = given
    elif len(reached) < len(points):
        for index in range(len(reached), len(points)):
            document.forget(("schedule", key, index))
        schedule[key] = reached
    left = ", ".join(show(point) for point in points[len(reached) :])
    return f"{left} dropped" if left else ""


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
    dropped = _drop_replaced(part, path, tree, document)
    notes += dropped.values()
    given = {key: value for key, value in tree.items() if key not in part.section.model_fields}
    try:
        checked = _validated(entry.arguments, given)
    except ValidationError as error:
        found = problems_of(error, entry.arguments, given, also_known=part.section.model_fields)
        return [_below(path, each, _supplied(part.kind, each), dropped) for each in found]
    arguments[path] = checked
    return []


def _below(path: KeyPath, problem: Problem, hint: str, dropped: Mapping[KeyPath, str]) -> Problem:
    """The problem of a part with its place in the recipe; of missing arguments also where they were dropped."""
    place = (*path, *problem.path)
    named = [
        note for key, note in dropped.items() if key == place or (place == path and str(key[-1]) in problem.message)
    ]
    return Problem(place, problem.message + hint + "".join(f" ({note})" for note in named), problem.about)


def _supplied(kind: str, problem: Problem) -> str:
    """The hint for a missing argument that is given elsewhere: by the builder, such as num_classes, or as data.fold."""
    if kind == "dataset" and re.match(r"split needs .*\bfold\b", problem.message):
        return "; data.fold gives all splits their fold"
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


def _drop_replaced(part: PartSpec, path: KeyPath, tree: dict[str, Any], document: Document) -> dict[KeyPath, str]:
    """Drop the arguments of a name that a later recipe or the command line replaced; a note on each by its place.

    Keys that all names take stay. `backbone_args` are the arguments of `backbone`.
    """
    own = [key for key in tree if key not in part.section.model_fields]
    notes = _drop_older((*path, part.name_key), path, own, document)
    for key in [key for key in tree if key.endswith("_args") and isinstance(tree[key], dict)]:
        notes |= _drop_older((*path, key.removesuffix("_args")), (*path, key), list(tree[key]), document)
    return notes


def _drop_older(name: KeyPath, path: KeyPath, keys: Sequence[str], document: Document) -> dict[KeyPath, str]:
    """Drop those of the keys below `path` that were last written before, in lower layers than, the value at `name`."""
    tree, chosen = lookup(document.tree, path), document.values.get(name, DEFAULT)
    notes: dict[KeyPath, str] = {}
    for key in keys:
        place, tables = (*path, key), (document.keys, document.values)
        origins = [table[inner] for inner in places(tree[key], place) for table in tables if inner in table]
        if origins and all(origin.layer < chosen.layer for origin in origins):
            now = f"{dotted(name)}={lookup(document.tree, name)} replaces what it is for ({chosen})"
            notes[place] = f"{origins[0]}: {dotted(place)}: dropped, since {now}"
            document.forget(place)
            del tree[key]
        elif isinstance(tree[key], dict):
            notes |= _drop_older(name, place, list(tree[key]), document)
    return notes


def _drop_outdated_expectations(recipe: Recipe, document: Document) -> None:
    """Drop each `expect` for another length or task: `train.epochs=1` cannot reach what nine epochs do."""
    decisive = (("train", "epochs"), ("train", "steps"), ("task", "name"))
    layer = max(document.values.get(place, DEFAULT).layer for place in decisive)
    # A key's layer is that of the file which wrote it last, even if it repeats a value.
    for metric in [name for name in recipe.expect if document.keys.get(("expect", name), DEFAULT).layer < layer]:
        document.forget(("expect", metric))
        del recipe.expect[metric], document.tree["expect"][metric]


def _with_arguments(recipe: Recipe, arguments: dict[KeyPath, dict[str, Any]]) -> Recipe:
    """The recipe with validated arguments in all parts, also those it leaves out."""
    recipe = recipe.model_copy(deep=True)  # default sections are shared between recipes
    for part in PARTS:
        for path, section in part.sections(recipe).items():
            extra = section.model_extra
            assert extra is not None
            if path not in arguments:
                entry = register.kind(part.kind).find(getattr(section, part.name_key))
                assert entry is not None
                arguments[path] = _validated(entry.arguments, extra)
            extra.clear()
            extra.update(arguments[path])
    return recipe


def _validated(model: type[Arguments], given: dict[str, Any]) -> dict[str, Any]:
    return dict(model.model_validate_json(_text(given)))


def _text(tree: Any) -> str:
    # Strict validation of JSON text, unlike that of Python objects, takes a list where a tuple is declared.
    return json.dumps(tree)


def recipe_error(problems: Sequence[Problem], document: Document) -> RecipeError:
    """The error with the first problem of each place, ordered by file, line and column."""
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
    message = _ENDLESS.sub(r"\1…", message)
    return f"{origin}: {key}{message}"


def _origin(problem: Problem, document: Document) -> Origin:
    if problem.about == "key":
        return document.keys.get(problem.path) or nearest_origin(document, problem.path)
    if (
        problem.about == "value" and problem.path and problem.path in document.values
    ):  # what a check refuses may be but partly given
        inside = (document.values[place] for place in places(lookup(document.tree, problem.path), problem.path))
        return next((origin for origin in inside if origin.source == COMMAND_LINE), document.values[problem.path])
    return nearest_origin(document, problem.path)


def nearest_origin(document: Document, path: KeyPath) -> Origin:
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
