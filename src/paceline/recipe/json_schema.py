"""The JSON Schema of recipes, for completion, explanations and checks in editors, and the recipe reference made of it.

The schema says what may stand where. What must be there it leaves to `paceline check`, since a recipe that extends
another may be partial.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline.core.registry import Entry, Family, register
from paceline.recipe import schema
from paceline.recipe.parts import PARTS, PartSpec
from paceline.recipe.problems import LenientJsonSchema, Node, describe
from paceline.recipe.schema import NamedPart, Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ROOT = "#/$defs/"
_EXTENDS: Node = {
    "description": "Recipes to extend: files relative to this one, or recipes that ship with paceline.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file with all registered names."""
    definitions = {name: _without_required(node) for name, node in _definitions().items()}
    return {"$schema": DIALECT, "title": "Paceline recipe", "$ref": _ROOT + Recipe.__name__, "$defs": definitions}


def _definitions() -> dict[str, Node]:
    """The sections of a recipe, its parts, and the arguments of each name."""
    definitions = _sections()
    for name, part in _parts().items():
        definitions |= {key: _arguments(choice) for key, choice in _choices(part.kind).items()}
        definitions[name] = _part(part, definitions[name])
    recipe = definitions[Recipe.__name__]
    recipe["properties"] = {"extends": _EXTENDS, **recipe["properties"]}
    return definitions


def _parts() -> dict[str, PartSpec]:
    return {part.section.__name__: part for part in PARTS}


def _sections() -> dict[str, Node]:
    """The definitions of the recipe's sections and parts, each key with its docstring."""
    models: list[type[BaseModel]] = [Recipe, *dict.fromkeys(part.section for part in PARTS)]
    _, generated = models_json_schema(
        [(model, "validation") for model in models],
        ref_template=_ROOT + "{model}",
        schema_generator=LenientJsonSchema,
    )
    definitions: dict[str, Node] = generated["$defs"]
    for name, node in definitions.items():
        del node["title"]
        for key, property_node in node["properties"].items():
            property_node["description"] = _docstrings().get((name, key)) or _docstrings()[NamedPart.__name__, key]
    return definitions


@cache
def _docstrings() -> dict[tuple[str, str], str]:
    """What is written below each key of a section, by the section's and the key's name."""
    found = {}
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for key, text in zip(section.body, section.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and is_text:
                found[section.name, key.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return found


def _choices(kind: str) -> dict[str, Entry | Family]:
    """What a part of this kind may name, by the key of its definition."""
    registry = register.kind(kind)
    entries: dict[str, Entry | Family] = {f"{kind}.{entry.name}": entry for entry in registry}
    return entries | {f"{kind}.{family.prefix.replace('/', '.')}any": family for family in registry.families}


def _arguments(choice: Entry | Family) -> Node:
    """The arguments of a name; what else may stand beside them is the part's affair."""
    node: Node = choice.arguments.model_json_schema(schema_generator=LenientJsonSchema)
    kept = {key: node[key] for key in ("properties", "required", "$defs") if key in node}
    return ({"description": choice.summary} if choice.summary else {}) | kept


def _part(part: PartSpec, section: Node) -> Node:
    """A part in full or as just a name; one that leaves its name open may have the arguments of any."""
    key, choices, registry = part.name_key, _choices(part.kind), register.kind(part.kind)
    names = [{"enum": [entry.name for entry in registry]}, *(_prefixed(family) for family in registry.families)]
    named = [
        {
            "if": {"properties": {key: _prefixed(choice) if isinstance(choice, Family) else {"const": choice.name}}}
            | {"required": [key]},
            "then": {"$ref": _ROOT + name},
        }
        for name, choice in choices.items()
    ]
    anything = {argument: True for choice in choices.values() for argument in choice.arguments.model_fields}
    unnamed = {"if": {"not": {"required": [key]}}, "then": {"properties": anything}}
    full: Node = {name: value for name, value in section.items() if name != "additionalProperties"} | {
        "properties": section["properties"] | {key: section["properties"][key] | {"anyOf": names}},
        "allOf": [*named, unnamed],
        "unevaluatedProperties": False,
    }
    return {"anyOf": [*names, full]}


def _prefixed(family: Family) -> Node:
    return {"type": "string", "pattern": f"^{re.escape(family.prefix)}."}


def _without_required(node: Node) -> Node:
    """The same without what its own object must have; conditions further inside keep theirs."""
    if "anyOf" in node:
        return {**node, "anyOf": [_without_required(branch) for branch in node["anyOf"]]}
    return {key: value for key, value in node.items() if key not in ("required", "checks")}


_HEAD = """# Recipe reference

Every key of a recipe. `paceline schema` prints the same for editors; `make table` writes this page.

A part that is chosen by name is a mapping, `{name: NAME, …}`, with the arguments of that name beside it, or the bare
name. A key without a default is required, but for `extends`.
"""


def reference() -> str:
    """Every key with its type, its default and a sentence, as a page of Markdown."""
    definitions, parts = _definitions(), _parts()
    lines = [_HEAD, "## Sections", ""]
    for key, name in _places(definitions, "", Recipe.__name__, set()):
        node = _object(definitions[name])
        lines += [f"### {f'`{key}`' if key else 'Top level'}", "", str(node["description"]), ""]
        lines += _table(node, definitions, parts[name].name_key if name in parts else None)
    for kind in dict.fromkeys(part.kind for part in PARTS):
        lines += [f"## {kind.replace('_', ' ').capitalize()}", ""]
        for name, choice in _choices(kind).items():
            node = definitions[name]
            own = choice.name if isinstance(choice, Entry) else f"{choice.prefix}NAME"
            lines += [f"### `{own}`", "", node.get("description", ""), ""]
            if isinstance(choice, Family):  # of arguments that only some members have, nothing more is known
                described = {key: each for key, each in node.get("properties", {}).items() if "description" in each}
                node = {"properties": described}
            lines += _table(node, definitions) if node.get("properties") else []
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
    own = [node["$ref"].removeprefix(_ROOT)] if "$ref" in node else []
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
