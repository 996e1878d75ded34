"""The JSON Schema of recipes, for completion, explanations and checks in editors.

Definitions say what may stand where; those named `required.…` say what must. A recipe that extends another is held to
the first alone.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline.core.arguments import Arguments
from paceline.core.registry import Entry, Family, Registry, register
from paceline.recipe import schema
from paceline.recipe.parts import PARTS, PartSpec
from paceline.recipe.problems import LenientJsonSchema, Node
from paceline.recipe.schema import NamedPart, Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ROOT = "#/$defs/"
_REQUIRED = "required."
_EXTENDS: Node = {
    "description": "Recipes to extend: files relative to this one, or recipes that ship with paceline.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file with all registered names; a recipe that extends another may be partial."""
    parts = {part.section.__name__: part for part in PARTS}
    definitions = _sections()
    required = {name: dict(node) for name, node in definitions.items()}
    for name, part in parts.items():
        for key, choice in _choices(part).items():
            definitions[key] = _arguments(choice)
        required[name] = _required_part(part, definitions[name])
        definitions[name] = _part(part, definitions[name])
    recipe = definitions[Recipe.__name__]
    recipe["properties"] = {"extends": _EXTENDS, **recipe["properties"]}
    musts = {_REQUIRED + name: must for name, node in required.items() if (must := _must(node, required))}
    return {
        "$schema": DIALECT,
        "title": "Paceline recipe",
        "$ref": _ROOT + Recipe.__name__,
        "if": {"not": {"required": ["extends"]}},
        "then": {"$ref": _ROOT + _REQUIRED + Recipe.__name__},
        "$defs": {name: _without_required(node) for name, node in definitions.items()} | musts,
    }


def _sections() -> dict[str, Node]:
    """The definitions of the recipe's sections and parts, each key with its docstring."""
    models: list[type[BaseModel]] = [Recipe, *dict.fromkeys(part.section for part in PARTS)]
    _, generated = models_json_schema(
        [(model, "validation") for model in models],
        ref_template=_ROOT + "{model}",
        schema_generator=LenientJsonSchema,
    )
    definitions: dict[str, Node] = _tidied(generated["$defs"])
    for name, node in definitions.items():
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


def _choices(part: PartSpec) -> dict[str, Entry | Family]:
    """What a part may name, by the key of its definition."""
    registry = register.kind(part.kind)
    entries: dict[str, Entry | Family] = {f"{part.kind}.{entry.name}": entry for entry in registry}
    return entries | {f"{part.kind}.{family.prefix.replace('/', '.')}any": family for family in registry.families}


def _arguments(choice: Entry | Family) -> Node:
    """The arguments of a name; what else may stand beside them is the part's affair."""
    model: type[Arguments] = choice.arguments
    node: Node = _tidied(model.model_json_schema(schema_generator=LenientJsonSchema))
    kept = {key: node[key] for key in ("properties", "required", "$defs") if key in node}
    return ({"description": choice.summary} if choice.summary else {}) | kept


def _match(choice: Entry | Family) -> Node:
    return {"const": choice.name} if isinstance(choice, Entry) else _prefixed(choice.prefix)


def _prefixed(prefix: str) -> Node:
    return {"type": "string", "pattern": f"^{re.escape(prefix)}."}


def _part(part: PartSpec, section: Node) -> Node:
    """A part in full or as just a name; one that leaves its name open may have the arguments of any."""
    key, choices = part.name_key, _choices(part)
    named = [
        {"if": {"properties": {key: _match(choice)}, "required": [key]}, "then": {"$ref": _ROOT + name}}
        for name, choice in choices.items()
    ]
    anything = {argument: True for choice in choices.values() for argument in choice.arguments.model_fields}
    unnamed = {"if": {"not": {"required": [key]}}, "then": {"properties": anything}}
    every_name = {"anyOf": _names(register.kind(part.kind))}
    full: Node = {name: value for name, value in section.items() if name != "additionalProperties"} | {
        "properties": section["properties"] | {key: section["properties"][key] | every_name},
        "allOf": [*named, unnamed],
        "unevaluatedProperties": False,
    }
    return {"anyOf": [*_names(register.kind(part.kind)), full]}


def _names(registry: Registry) -> list[Node]:
    return [{"enum": [entry.name for entry in registry]}, *(_prefixed(family.prefix) for family in registry.families)]


def _required_part(part: PartSpec, section: Node) -> Node:
    """What a part must have: its own keys, and by its name the arguments without a default; a bare name has none."""
    needing = {name: list(_required_arguments(choice)) for name, choice in _choices(part).items()}
    choices = _choices(part)
    own = section.get("required", [])
    rules = [
        {"if": {"properties": {part.name_key: _match(choices[name])}, "required": [part.name_key]},
         "then": {"required": arguments}}
        for name, arguments in needing.items() if arguments
    ]  # fmt: skip
    bare = [_match(choices[name]) for name, arguments in needing.items() if arguments]
    is_never_bare = bool(set(own) - {part.name_key})
    refused: Node = {"not": {"type": "string"}} if is_never_bare else {"not": {"anyOf": bare}} if bare else {}
    return {**section, **({"allOf": rules} if rules else {}), **refused}


def _required_arguments(choice: Entry | Family) -> list[str]:
    return [name for name, field in choice.arguments.model_fields.items() if field.is_required()]


def _must(node: Any, required: dict[str, Node]) -> Node:
    """Of a schema only what it demands to be there, here and further inside; empty if nothing."""
    if "$ref" in node:
        name = node["$ref"].removeprefix(_ROOT)
        return {"$ref": _ROOT + _REQUIRED + name} if _must(required[name], required) else {}
    if branches := node.get("anyOf") or node.get("oneOf"):
        found = [_must(branch, required) for branch in branches]
        return _any_branch(branches, found) if any(found) else {}
    kept: Node = {key: node[key] for key in ("required", "allOf", "not") if node.get(key)}
    inner = {key: must for key, value in node.get("properties", {}).items() if (must := _must(value, required))}
    if inner:
        kept["properties"] = inner
    if isinstance(node.get("items"), dict) and (must := _must(node["items"], required)):
        kept["items"] = must
    for values in node.get("patternProperties", {}).values():
        kept["additionalProperties"] = {"type": "object", **_must(values, required)}
    return kept


def _any_branch(branches: list[Node], musts: list[Node]) -> Node:
    """A value is held to what the branch that it belongs to demands."""
    chosen = [must if must else {"type": branch["type"]} for branch, must in zip(branches, musts, strict=True)]
    return chosen[0] if len(chosen) == 1 else {"anyOf": chosen}


def _tidied(node: Any) -> Any:
    """The same without the titles that pydantic makes of names, and with no other keys than a pattern allows."""
    if isinstance(node, list):
        return [_tidied(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if "patternProperties" in node else {}
    kept = {key: _tidied(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}
    return kept | closed


def _without_required(node: Node) -> Node:
    """The same without what its own object must have; conditions further inside keep theirs."""
    if "anyOf" in node:
        return {**node, "anyOf": [_without_required(branch) for branch in node["anyOf"]]}
    return {key: value for key, value in node.items() if key not in ("required", "checks")}
