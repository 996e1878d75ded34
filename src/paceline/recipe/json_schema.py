"""The JSON Schema of recipes, for completion and checks in editors."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline.core.arguments import Arguments
from paceline.core.registry import Registry, register
from paceline.recipe.document import PartSpec
from paceline.recipe.problems import LenientJsonSchema, Node
from paceline.recipe.schema import PARTS, Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ROOT = "#/$defs/"
_PARTIAL = "partial."
_EXTENDS: Node = {
    "description": "Recipes to extend: files relative to this one, or recipes that ship with paceline.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file with all registered names; a recipe that extends another may be partial."""
    parts = {part.section: part for part in PARTS}
    definitions, names = _generate([Recipe, *parts, *(model for part in PARTS for model in _arguments(part))])
    whole, partial = dict(definitions), dict(definitions)
    for section, part in parts.items():
        whole[names[section]] = _part(part, definitions, names, is_partial=False)
        partial[names[section]] = _part(part, definitions, names, is_partial=True)
    recipe = names[Recipe]
    partial[recipe] = partial[recipe] | {"properties": {"extends": _EXTENDS} | partial[recipe]["properties"]}
    return {
        "$schema": DIALECT,
        "title": "Paceline recipe",
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": _ROOT + _PARTIAL + recipe},
        "else": {"$ref": _ROOT + recipe},
        "$defs": whole | {_PARTIAL + name: _as_partial(node) for name, node in partial.items()},
    }


def _generate(models: list[type[BaseModel]]) -> tuple[dict[str, Node], dict[type[BaseModel], str]]:
    """The definitions of the models and their references, and the name of each model's definition."""
    unique = list(dict.fromkeys(models))
    references, generated = models_json_schema(
        [(model, "validation") for model in unique],
        ref_template=_ROOT + "{model}",
        schema_generator=LenientJsonSchema,
    )
    names = {model: references[model, "validation"]["$ref"].removeprefix(_ROOT) for model in unique}
    return generated["$defs"], names


def _arguments(part: PartSpec) -> dict[type[Arguments], list[Node]]:
    """The argument models of a kind, each with the schema that matches its names."""
    registry = register.kind(part.kind)
    found: dict[type[Arguments], list[Node]] = {}
    for entry in registry:
        matches = found.setdefault(entry.arguments, [{"enum": []}])
        matches[0]["enum"].append(entry.name)
    for family in registry.families:
        found.setdefault(family.arguments, []).append(_prefixed(family.prefix))
    return found


def _prefixed(prefix: str) -> Node:
    return {"type": "string", "pattern": f"^{re.escape(prefix)}."}


def _part(part: PartSpec, definitions: dict[str, Node], names: dict[type[BaseModel], str], is_partial: bool) -> Node:
    """A part as a mapping or a name; a partial one may omit its name."""
    section = definitions[names[part.section]]
    default = None if is_partial else part.section.model_fields[part.name_key].default
    required = section.get("required", [])
    branches: list[Node] = []
    shorthand: list[Node] = []
    anything: Node = {}
    for model, matches in _arguments(part).items():
        takes = definitions[names[model]]
        anything |= dict.fromkeys(takes.get("properties", {}), True)
        is_default = any(default in match.get("enum", []) for match in matches)
        named: Node = {"properties": {part.name_key: _any_of(matches)}}
        condition = named if is_default else named | {"required": [part.name_key]}
        then = {key: takes[key] for key in ("properties", "required") if key in takes}
        branches.append({"if": condition, "then": then})
        if is_partial or not takes.get("required"):
            shorthand += matches
    if is_partial:
        branches.append({"if": {"not": {"required": [part.name_key]}}, "then": {"properties": anything}})
    every_name = section["properties"][part.name_key] | _any_of(_names(register.kind(part.kind)))
    full: Node = {key: value for key, value in section.items() if key != "additionalProperties"} | {
        "properties": section["properties"] | {part.name_key: every_name},
        "allOf": branches,
        "unevaluatedProperties": False,
    }
    can_be_short = is_partial or set(required) <= {part.name_key}
    return {"anyOf": [*(shorthand if can_be_short else []), full]}


def _names(registry: Registry) -> list[Node]:
    return [{"enum": [entry.name for entry in registry]}, *(_prefixed(family.prefix) for family in registry.families)]


def _any_of(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"anyOf": nodes}


def _as_partial(node: Any) -> Any:
    """The same schema with nothing required."""
    if isinstance(node, list):
        return [_as_partial(each) for each in node]
    if not isinstance(node, dict):
        return node
    changed = {key: value if key == "if" else _as_partial(value) for key, value in node.items()}
    if isinstance(node.get("required"), list):
        del changed["required"]
    if isinstance(node.get("$ref"), str):
        changed["$ref"] = _ROOT + _PARTIAL + node["$ref"].removeprefix(_ROOT)
    return changed
