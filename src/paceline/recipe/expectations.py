"""Values and expectations in words: `a number > 0`, `"fast"`, `did you mean …?`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from paceline.core.text import pluralize
from paceline.recipe.yaml_tree import resolve_scalar

Node = dict[str, Any]
"""A part of a JSON Schema; where a list of them is taken, they are alternatives without further references."""

MAX_SHOWN = 60
"""Characters of a found value that a message shows."""

_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def show(value: Any) -> str:
    """A found value as JSON, cut short."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def join_or(words: Sequence[str]) -> str:
    """Words as in a sentence: `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def near(word: str, known: Sequence[str]) -> list[str]:
    """Up to three of the known words that may have been meant, the likeliest first."""
    same = [name for name in known if name.casefold() == word.casefold() or name.endswith(f"/{word}")]
    return same[:3] or get_close_matches(word, known, n=3)


def describe(nodes: Sequence[Node]) -> str:
    """What any of the alternatives accepts: `a whole number ≥ 1 or auto`."""
    types = _types(nodes)
    literals = [value if isinstance(value, str) else show(value) for value in _literals(nodes)]
    if len(literals) > 1 and not types - {"null"}:
        words = [f"one of {', '.join(literals)}"]
    else:
        hidden = {"null"} | ({"integer"} if "number" in types else set())
        typed = [node for node in nodes if _types([node]) - hidden]
        words = [*dict.fromkeys(word for node in typed for word in _describe_type(node)), *literals]
    return join_or([*words, *(["null"] if "null" in types else [])] or ["another value"])


def hint(value: Any, nodes: Sequence[Node]) -> str:
    """What to do about a value that none of the alternatives accepts, if that can be told; begins with a semicolon."""
    types, literals = _types(nodes), _literals(nodes)
    if isinstance(value, str):
        meant = near(value, [literal for literal in literals if isinstance(literal, str)])
        if meant:
            return f"; did you mean {show(meant[0])}?"
        if types & _types_of(resolve_scalar(value)):
            return "; remove the quotes"
    elif isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return f"; write {int(value)}"
    elif isinstance(value, bool | int | float) and "string" in types:
        return "; quote it"
    if isinstance(value, str | bool | int | float) and types - {"null"} == {"array"}:
        return f"; write [{show(value)}]"
    return ""


def _literals(nodes: Sequence[Node]) -> list[Any]:
    return [value for node in nodes for value in node.get("enum", [node["const"]] if "const" in node else [])]


def _types(nodes: Sequence[Node]) -> set[str]:
    return {node["type"] for node in nodes if "type" in node and "const" not in node and "enum" not in node}


def _describe_type(node: Node) -> list[str]:
    match node["type"]:
        case "integer":
            return ["a whole number" + _bounds(node)]
        case "number":
            return ["a number" + _bounds(node)]
        case "boolean":
            return ["true", "false"]
        case "array":
            return ["a list" + _length(node)]
        case "object":
            is_part = "properties" in node and node.get("additionalProperties") is True
            return ["a name", "a mapping"] if is_part else ["a mapping"]
        case _:
            pattern = f" matching {node['pattern']}" if "pattern" in node else ""
            return [("a string that is not empty" if node.get("minLength") == 1 else "a string") + pattern]


def _bounds(node: Node) -> str:
    bounds = {key: node[key] for key in _SIGNS if key in node}
    if "exclusiveMinimum" in bounds and bounds.get("minimum", -math.inf) <= bounds["exclusiveMinimum"]:
        bounds.pop("minimum", None)
    if bounds.keys() == {"minimum", "maximum"}:
        return f" from {bounds['minimum']} to {bounds['maximum']}"
    return " " + " and ".join(f"{_SIGNS[key]} {bound}" for key, bound in bounds.items()) if bounds else ""


def _length(node: Node) -> str:
    least, most = node.get("minItems", 0), node.get("maxItems")
    if least == most:
        return f" of {pluralize(least, 'item')}"
    bounds = [f"at least {pluralize(least, 'item')}"] if least else []
    bounds += [f"at most {pluralize(most, 'item')}"] if most is not None else []
    return f" of {' and '.join(bounds)}" if bounds else ""


def _types_of(value: Any) -> set[str]:
    """The JSON types that an unquoted scalar would satisfy."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {"number"} if isinstance(value, float) else set()
