"""The run directory: what it holds beside checkpoints, and whether a recipe may continue it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.recipe.validate import CheckedRecipe

# What may differ between the parts of one run; everything else would make it another run.
_MAY_CHANGE = (
    "name", "observe", "checkpoint", "expect", "train.epochs", "train.steps", "data.workers", "data.loader",
    "evaluate.every_epochs", "evaluate.every_steps", "evaluate.workers",
    "data.train.root", "data.val.root", "data.test.root", "model.weights",
)  # fmt: skip


def recipe_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys that two resolved recipes disagree on and that may not change within a run, with both values."""
    old, new = dict(leaves(before)), dict(leaves(now))
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        may_change = any(key == allowed or key.startswith(allowed + ".") for allowed in _MAY_CHANGE)
        if not may_change and old.get(key) != new.get(key):
            lines.append(f"{key}: was {json.dumps(old.get(key))}, is {json.dumps(new.get(key))}")
    return lines


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree with its dotted key; empty mappings and lists count as values."""
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if not members or not tree:
        yield prefix, tree
        return
    for key, value in members:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def write_recipe(path: Path, resolved: dict[str, Any], checked: CheckedRecipe) -> None:
    """The resolved recipe as YAML that can be used again, each value followed by where it came from."""
    path.write_text("\n".join(recipe_lines(resolved, checked)) + "\n", encoding="utf-8")


def recipe_lines(resolved: dict[str, Any], checked: CheckedRecipe) -> list[str]:
    """The lines of `write_recipe`."""
    written = list(_written(resolved, "", 0))
    width = min(60, max(len(text) for text, key in written if key is not None))
    return [text if key is None else f"{text:<{width}}  # {checked.origin(key)}" for text, key in written]


def _written(value: Any, key: str, depth: int) -> Iterator[tuple[str, str | None]]:
    """Lines of block YAML, each with the key whose value stands on it, if any. Scalars are written as JSON."""
    indent = "  " * depth
    members = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in members:
        inner_key = f"{key}.{name}" if key else str(name)
        head = f"{indent}{name}:" if isinstance(value, dict) else f"{indent}-"
        if isinstance(inner, dict | list) and inner and not _is_flat(inner):
            yield head, None
            yield from _written(inner, inner_key, depth + 1)
        else:
            yield f"{head} {json.dumps(inner, ensure_ascii=False)}", inner_key


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)


def move_aside(out: Path) -> Path:
    """Rename an earlier run's directory to the first free `NAME~1`, `NAME~2`, …; nothing is lost."""
    number = 1
    while (aside := out.with_name(f"{out.name}~{number}")).exists():
        number += 1
    return out.rename(aside)
