"""The recipe reference: every key with its type, its default and a sentence, as Markdown, from the JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.core.registry import register
from paceline.recipe.json_schema import json_schema
from paceline.recipe.parts import PARTS
from paceline.recipe.problems import Node, describe

_ROOT = "#/$defs/"
_NAME_KEYS = {part.section.__name__: (part.name_key,) for part in PARTS}
_HEAD = """# Recipe reference

Every key of a recipe. `paceline schema` prints the same for editors; `make table` writes this page.

A part that is chosen by name is a mapping, `{name: NAME, …}`, with the arguments of that name beside it, or the bare
name. A key without a default is required, but for `extends`.
"""


def reference() -> str:
    """The whole page."""
    definitions: dict[str, Node] = json_schema()["$defs"]
    lines = [_HEAD, "## Sections", ""]
    for key, name in _sections(definitions, "", "Recipe"):
        node = _object(definitions[name])
        required = definitions.get(f"required.{name}", {}).get("required", [])
        lines += [f"### {f'`{key}`' if key else 'Top level'}", "", str(node["description"]), ""]
        properties = {key: _as_name(inner) if key in _NAME_KEYS.get(name, ()) else inner
                      for key, inner in node["properties"].items()}  # fmt: skip
        lines += _table(properties, required, definitions)
    for kind in dict.fromkeys(part.kind for part in PARTS):
        lines += _kind(kind, definitions)
    return "\n".join(lines).rstrip() + "\n"


def _as_name(node: Node) -> Node:
    """A key that holds one of the names that are listed further down."""
    return {key: node[key] for key in ("description", "default") if key in node} | {"type": "name"}


def _sections(definitions: dict[str, Node], key: str, name: str) -> Iterator[tuple[str, str]]:
    """Each section and part that a definition leads to, with its place; one that several places have is there once."""
    seen: set[str] = set()

    def walk(key: str, name: str) -> Iterator[tuple[str, str]]:
        if name in seen:
            return
        seen.add(name)
        yield key, name
        for inner, node in _object(definitions[name])["properties"].items():
            for reference in _references(node):
                yield from walk(f"{key}.{inner}" if key else inner, reference)

    yield from walk(key, name)


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [found for each in node for found in _references(each)]
    if not isinstance(node, dict):
        return []
    own = [node["$ref"].removeprefix(_ROOT)] if "$ref" in node else []
    return own + [found for key, value in node.items() if key != "default" for found in _references(value)]


def _object(node: Node) -> Node:
    """A section's own node, or that of a part written in full."""
    return node if "properties" in node else next(branch for branch in node["anyOf"] if "properties" in branch)


def _kind(kind: str, definitions: dict[str, Node]) -> Iterator[str]:
    """All names of a kind with their arguments."""
    registry = register.kind(kind)
    yield from (f"## {kind.replace('_', ' ').capitalize()}", "")
    families = {f"{family.prefix}NAME": f"{kind}.{family.prefix.replace('/', '.')}any" for family in registry.families}
    names = {entry.name: f"{kind}.{entry.name}" for entry in registry} | families
    for name, definition in names.items():
        node = definitions[definition]
        yield from (f"### `{name}`", "", node.get("description", ""), "")
        choice = registry.find(name)
        fields = choice.arguments.model_fields if choice and name not in families else {}
        if node.get("properties") and name not in families:
            yield from _table(node["properties"], [key for key in fields if fields[key].is_required()], definitions)
        elif node.get("properties"):
            named = {key: value for key, value in node["properties"].items() if "description" in value}
            yield from _table(named, [], definitions) if named else ()


def _table(properties: dict[str, Node], required: list[str], definitions: dict[str, Node]) -> list[str]:
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for key, node in properties.items():
        default = "" if key in required or "default" not in node else f"`{_written(node['default'])}`"
        cells = (f"`{key}`", _type(node, definitions), default, str(node.get("description", "")))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*rows, ""]


def _type(node: Node, definitions: dict[str, Node]) -> str:
    if node.get("type") == "name":
        return "a name"
    plain = [
        {key: value for key, value in each.items() if key != "pattern"} for each in _alternatives(node, definitions)
    ]
    return describe(plain) if plain else "anything"


def _alternatives(node: Node, definitions: dict[str, Node]) -> Iterator[Node]:
    """What a node allows, without references: a part is a name or a mapping."""
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix(_ROOT)]
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
