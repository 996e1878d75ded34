"""A resolved recipe: as YAML with where each value came from, and whether another one may continue its run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from paceline.core.errors import RecipeError
from paceline.recipe.document import Document
from paceline.recipe.validate import CheckedRecipe, validate

# What may differ between the parts of one run; everything else would make it another run.
_MAY_CHANGE = (
    "name", "use", "logging", "checkpoint", "expect", "train.epochs", "train.steps", "data.num_workers", "data.loader",
    "data.on_error", "data.max_skipped", "train.devices", "train.hang_seconds", "train.on_nonfinite",
    "evaluate.every_epochs", "evaluate.every_steps", "evaluate.num_workers",
    "model.weights",
)  # fmt: skip
# What these change of the data, its fingerprint tells.
_PLACE = re.compile(r"data\.(train|val|test(\.[^.]+)?)\.(root|file|stratify)")

_MAX_VALUE = 200  # characters of a value in a message
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*")
_NOT_STRINGS = {"true", "false", "null", "True", "False", "Null", "TRUE", "FALSE", "NULL"}


def recipe_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys that differ between two resolved recipes and must not change within a run, with both values.

    Keys that an older version did not have count as their defaults, empty lists and mappings as null.
    """
    old, new = (
        {key: value for key, value in leaves(tree) if value not in ([], {})} for tree in (_completed(before), now)
    )
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        is_allowed = any(key == allowed or key.startswith(allowed + ".") for allowed in _MAY_CHANGE)
        may_change = is_allowed or _PLACE.fullmatch(key)
        is_other_decoder = key == "data.loader" and "dali" in (old.get(key), new.get(key))
        if (not may_change or is_other_decoder) and old.get(key) != new.get(key):
            was, now_is = (json.dumps(values.get(key))[:_MAX_VALUE] for values in (old, new))
            lines.append(f"{key}: was {was}, is {now_is}")
    return lines


def _completed(resolved: dict[str, Any]) -> dict[str, Any]:
    """An older resolved recipe with the defaults of newer keys; unchanged if it is no longer valid."""
    try:
        return validate(Document(resolved)).resolved()
    except RecipeError:
        return resolved


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree with its dotted key; empty mappings and lists count as values."""
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if not members or not tree:
        yield prefix, tree
        return
    for key, value in members:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def recipe_lines(resolved: dict[str, Any], checked: CheckedRecipe) -> list[str]:
    """The resolved recipe as lines of YAML, with the origin of each value as a comment."""
    written = list(_written(resolved, "", 0))
    width = min(60, max(len(text) for text, key in written if key is not None))
    return [text if key is None else f"{text:<{width}}  # {checked.origin(key)}" for text, key in written]


def _written(value: Any, key: str, depth: int) -> Iterator[tuple[str, str | None]]:
    """Lines of block YAML, each with the key of its value, if any."""
    indent = "  " * depth
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        inner_key = f"{key}.{name}" if key else str(name)
        head = f"{indent}{_scalar(name)}:" if isinstance(value, dict) else f"{indent}-"
        if not inner or _is_flat(inner):
            yield f"{head} {_scalar(inner)}", inner_key
        elif isinstance(value, dict):
            yield head, None
            yield from _written(inner, inner_key, depth + 1)
        else:
            lines = list(_written(inner, inner_key, depth + 1))
            yield f"{head} {lines[0][0].lstrip()}", lines[0][1]
            yield from lines[1:]


def _is_flat(value: Any) -> bool:
    """Whether a value is written on one line."""
    return not isinstance(value, dict | list) or not (
        isinstance(value, dict) or any(isinstance(item, dict | list) for item in value)
    )


def _scalar(value: Any) -> str:
    """A value as YAML: JSON without quotes where they are not needed."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value not in _NOT_STRINGS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    """The escape of a character that JSON allows and YAML does not."""
    return character if character.isprintable() else f"\\U{ord(character):08x}"
