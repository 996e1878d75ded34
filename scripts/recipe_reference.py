"""Prints docs/recipe-reference.md, every key of a recipe, from the JSON Schema; `make table` writes the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.core.registry import Entry, Family
from paceline.recipe.json_schema import ROOT, choices_of, definitions
from paceline.recipe.parts import PARTS
from paceline.recipe.problems import Node, describe
from paceline.recipe.schema import Recipe

_HEAD = """# Recipe reference

Every key of a recipe. `paceline schema` prints the same for editors; `make table` writes this page.

A part that is chosen by name is a mapping, `{name: NAME, …}`, with the arguments of that name beside it, or the bare
name. A key without a default is required, but for `extends`.
"""


def reference() -> str:
    """Every key with its type, its default and a sentence, as a page of Markdown."""
    defined, parts = definitions(), {part.section.__name__: part for part in PARTS}
    lines = [_HEAD, "## Sections", ""]
    for key, name in _places(defined, "", Recipe.__name__, set()):
        node = _object(defined[name])
        lines += [f"### {f'`{key}`' if key else 'Top level'}", "", str(node["description"]), ""]
        lines += _table(node, defined, parts[name].name_key if name in parts else None)
    for kind in dict.fromkeys(part.kind for part in PARTS):
        lines += [f"## {kind.replace('_', ' ').capitalize()}", ""]
        for name, choice in choices_of(kind).items():
            node = defined[name]
            own = choice.name if isinstance(choice, Entry) else f"{choice.prefix}NAME"
            lines += [f"### `{own}`", "", node.get("description", ""), ""]
            if isinstance(choice, Family):  # of arguments that only some members have, nothing more is known
                described = {key: each for key, each in node.get("properties", {}).items() if "description" in each}
                node = {"properties": described}
            lines += _table(node, defined) if node.get("properties") else []
    return "\n".join(lines).rstrip() + "\n"


def _places(definitions: dict[str, Node], key: str, name: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Each section and part that a definition leads to, with its place; one that several places have is there once."""
    if name in seen:
        return
    seen.add(name)
    yield key, name
    for inner, node in _object(definitions[name])["properties"].items():
        for reference in _references(node):
            yield from _places(definitions, f"{key}.{inner}" if key else inner, reference, seen)


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [found for each in node for found in _references(each)]
    if not isinstance(node, dict):
        return []
    own = [node["$ref"].removeprefix(ROOT)] if "$ref" in node else []
    return own + [found for key, value in node.items() if key != "default" for found in _references(value)]


def _object(node: Node) -> Node:
    """A section's own node, or that of a part written in full."""
    return node if "properties" in node else next(branch for branch in node["anyOf"] if "properties" in branch)


def _table(node: Node, definitions: dict[str, Node], name_key: str | None = None) -> list[str]:
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for key, value in node["properties"].items():
        is_open = key in node.get("required", ()) or "default" not in value
        default = "" if is_open else f"`{_written(value['default'])}`"
        kind = "a name" if key == name_key else _type(value, definitions)
        cells = (f"`{key}`", kind, default, str(value.get("description", "")))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*rows, ""]


def _type(node: Node, definitions: dict[str, Node]) -> str:
    plain = [
        {key: value for key, value in each.items() if key != "pattern"} for each in _alternatives(node, definitions)
    ]
    return describe(plain) if plain else "anything"


def _alternatives(node: Node, definitions: dict[str, Node]) -> Iterator[Node]:
    """What a node allows, without references: a part is a name or a mapping."""
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix(ROOT)]
        yield {"type": "object", "properties": {}, "additionalProperties": "anyOf" in target}
    elif branches := node.get("anyOf") or node.get("oneOf"):
        for branch in branches:
            yield from _alternatives(branch, definitions)
    elif "type" in node or "enum" in node or "const" in node:
        yield node


def _written(value: Any) -> str:
    """A default as a recipe would say it; of a whole section its keys have theirs."""
    if isinstance(value, dict) and len(value) > 1:
        return "{…}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    print(reference(), end="")
