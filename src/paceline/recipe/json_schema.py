"""The JSON Schema of recipes, for completion, explanations and checks in editors.

The schema says what may stand where. What must be there it leaves to `paceline check`, since a recipe that extends
another may be partial.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline.core.registry import Entry, Family, register
from paceline.recipe import schema
from paceline.recipe.parts import PARTS, PartSpec
from paceline.recipe.problems import LenientJsonSchema, Node
from paceline.recipe.schema import NamedPart, Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ROOT = "#/$defs/"
_EXTENDS: Node = {
    "description": "Recipes to extend: files relative to this one, or recipes that ship with paceline.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def json_schema() -> dict[str, Any]:
    """The schema of a recipe file with all registered names."""
    allowed = {name: _without_required(node) for name, node in definitions().items()}
    return {"$schema": DIALECT, "title": "Paceline recipe", "$ref": ROOT + Recipe.__name__, "$defs": allowed}


def definitions() -> dict[str, Node]:
    """The sections of a recipe, its parts, and the arguments of each name."""
    found = _sections()
    for part in PARTS:
        name = part.section.__name__
        found |= {key: _arguments(choice) for key, choice in choices_of(part.kind).items()}
        if "anyOf" not in found[name]:
            found[name] = _part(part, found[name])
    recipe = found[Recipe.__name__]
    recipe["properties"] = {"extends": _EXTENDS, **recipe["properties"]}
    return found


def _sections() -> dict[str, Node]:
    """The definitions of the recipe's sections and parts, each key with its docstring."""
    models: list[type[BaseModel]] = [Recipe, *dict.fromkeys(part.section for part in PARTS)]
    _, generated = models_json_schema(
        [(model, "validation") for model in models],
        ref_template=ROOT + "{model}",
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


def choices_of(kind: str) -> dict[str, Entry | Family]:
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
    key, choices, registry = part.name_key, choices_of(part.kind), register.kind(part.kind)
    names = [{"enum": [entry.name for entry in registry]}, *(_prefixed(family) for family in registry.families)]
    named = [
        {
            "if": {"properties": {key: _prefixed(choice) if isinstance(choice, Family) else {"const": choice.name}}}
            | {"required": [key]},
            "then": {"$ref": ROOT + name},
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
