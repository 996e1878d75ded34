"""Error messages for recipes: what was found, what was expected, and what may have been meant."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from paceline.core.text import join_first, pluralize
from paceline.recipe.document import KeyPath, dotted, resolve_scalar

Node = dict[str, Any]
"""A node of a JSON Schema; a list of nodes are alternatives without references."""

MAX_CHARS = 60
"""Characters of a value that a message shows."""

PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$": "of letters, digits, dots, hyphens and underscores, at most 100 of them",
    r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$": "of letters, digits, hyphens and underscores, at most 100 of them",
    r"^(auto|cpu|cuda(:[0-9]+)?|mps)$": "such as auto, cpu, cuda, cuda:0 or mps",
    r"^.+\.(csv|xlsx)$": "that ends in .csv or .xlsx",
    r"^\.": "that begins with a dot, such as .jpg",
    r"^[0-9]{1,5}-[0-9]{1,5}$": "with a range of ids, such as 1-255",
    r'^[^\r\n"]$': 'of one character that is neither a line end nor a quote; a tab is "\\t" in double quotes',
}
"""The patterns of the schema in words."""

_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def show(value: Any) -> str:
    """A value as JSON, truncated."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"


def join_or(words: Sequence[str]) -> str:
    """Join words: `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def near(word: str, known: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """Up to three similar words, the best first; `cutoff` is how similar they are, up to 1."""
    same = [name for name in known if name.casefold() == word.casefold() or name.endswith(f"/{word}")]
    initials = [name for name in known if len(word) > 1 and _initials(name) == word.casefold()]
    return same[:3] or initials[:3] or get_close_matches(word, known, n=3, cutoff=cutoff)


def _initials(name: str) -> str:
    """What people shorten a name to: `ce` for `cross_entropy`."""
    return "".join(part[:1] for part in name.split("_"))


def describe(nodes: Sequence[Node]) -> str:
    """What the alternatives accept: `a whole number ≥ 1 or auto`."""
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
    """A suggestion for a value that no alternative accepts, starting with a semicolon, or an empty string."""
    types, literals = _types(nodes), _literals(nodes)
    if isinstance(value, str):
        meant = near(value, [literal for literal in literals if isinstance(literal, str)], cutoff=0.7)
        if meant:
            return f"; did you mean {show(meant[0])}?"
        if types & _types_of(resolve_scalar(value)):
            return "; remove the quotes"
    elif value is None and "none" in literals:
        return "; write none"
    elif isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return f"; write {int(value)}"
    elif isinstance(value, bool | int | float) and "string" in types:
        return "; quote it"
    takes_one = any(node.get("minItems", 0) <= 1 for node in nodes if _types([node]) == {"array"})
    if isinstance(value, str | bool | int | float) and types - {"null"} == {"array"} and takes_one:
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
            pattern = f" {PATTERNS.get(node['pattern'], 'of another form')}" if "pattern" in node else ""
            return [("a non-empty string" if node.get("minLength") == 1 else "a string") + pattern]


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
    """The JSON types of an unquoted scalar."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {"number"} if isinstance(value, float) else set()


def _fits(value: Any, node: Node) -> bool:
    """Whether a node takes a number."""
    return bool(_types([node]) & _types_of(value)) and node.get("minimum", value) <= value <= node.get("maximum", value)


MAX_NAMES = 20
"""Names that a message lists when none is similar."""

_MOST = 2_000
"""Errors that are reported; formatting them takes time."""

Errors = Sequence[Mapping[str, Any]]

_FORMER = {
    **dict.fromkeys(("kinds", "rules", "presets"), "param_groups"),
    "pretrained": "weights",
    "learning_rate": "lr",
    **dict.fromkeys(("accuracy", "acc", "val_accuracy"), "top1"),
    "map": "ap",
    **dict.fromkeys(("binary_cross_entropy", "bce_with_logits", "binary_cross_entropy_with_logits"), "bce"),
}
"""Keys, metrics and losses that have another name now, or elsewhere, where that is not near."""

# Errors that say no more than the schema does, and less well; so does every type that ends in "_type".
_IN_SCHEMA = {
    "literal_error", "enum", "greater_than", "greater_than_equal", "less_than", "less_than_equal", "missing",
    "string_pattern_mismatch", "string_too_short", "string_too_long", "too_short", "too_long", "int_from_float",
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A message about a value, its key, or its absence."""

    path: KeyPath
    message: str
    about: Literal["value", "key", "absence"] = "value"


class LenientJsonSchema(GenerateJsonSchema):
    """A JSON Schema without titles of keys, in which types unknown to JSON accept anything."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        node = super().dict_schema(schema)
        return node | {"additionalProperties": False} if "patternProperties" in node else node

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        """Describe a user's own type as anything."""
        return {}


def problems_of(
    error: ValidationError, model: type[BaseModel], tree: Any, also_known: Iterable[str] = ()
) -> list[Problem]:
    """All problems of a tree that a model refused, one per place; `also_known` are further valid keys."""
    errors: dict[KeyPath, list[Mapping[str, Any]]] = {}
    branches: set[KeyPath] = set()
    for detail in error.errors(include_url=False)[:_MOST]:
        path, is_branch = _place(detail, tree)
        errors.setdefault(path, []).append(detail)
        if is_branch:
            branches.add(path)
    # Where one branch of a union got further inside, what the others say about the whole value is noise.
    noise = {path for path in branches if any(other[: len(path)] == path and other != path for other in errors)}
    words = _Words(_schema(model), tree, list(also_known))
    return [words.problem(path, details) for path, details in errors.items() if path not in noise]


@cache
def _schema(model: type[BaseModel]) -> Node:
    return model.model_json_schema(schema_generator=LenientJsonSchema)


def unknown_key(key: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """The message for an unknown key; `known` and `elsewhere` are keys to suggest."""
    meant = [_FORMER[key]] if _FORMER.get(key) in known else near(key, known, 0.8) or elsewhere or near(key, known)
    if meant:
        return f'unknown key; did you mean "{meant[0]}"?'
    return f"unknown key; known here: {join_first(known, MAX_NAMES)}" if known else "unknown key"


_CLOSE = 0.8  # a library has so many names that any word resembles some of them


def unknown_name(kind: str, name: str, known: Sequence[str], own: str = "") -> str:
    """The message for an unregistered name; `own` is what to say about parts of the user's.

    It comes first unless the name resembles another; those without a library, ours and the user's, are tried first.
    """
    message, ours = f"unknown {kind} {show(name)}", [each for each in known if "/" not in each]
    if _FORMER.get(name.casefold()) in known:
        return f"{message}; did you mean {show(_FORMER[name.casefold()])}?{own}"
    if meant := near(name, known, _CLOSE) or near(name, ours):
        return f"{message}; did you mean {join_or([show(each) for each in meant])}?{own}"
    return f"{message}{own}; expected {expected_names(known)}" if known else f"{message}{own}"


OWN_PARTS = " (--use FILE brings parts of your own; in Python, import it)"


def own_parts(kind: str, own: Mapping[str, Sequence[str]]) -> str:
    """What an unknown name is followed by: the names that modules of the user's have registered, by kind."""
    if not any(own.values()):
        return OWN_PARTS
    others = [f"{other} {name}" for other, names in own.items() if other != kind for name in names]
    found = join_first(own.get(kind, ()), MAX_NAMES) or f"no {kind}, but {join_first(others, MAX_NAMES)}"
    return f" (your modules register {found})"


def expected_names(known: Sequence[str]) -> str:
    """The valid names, or the first of them; those of a library as `timm/NAME`."""
    ours = [name for name in known if "/" not in name]
    known = [*ours[:MAX_NAMES], *dict.fromkeys(f"{name.partition('/')[0]}/NAME" for name in known if "/" in name)]
    more = f" and {len(ours) - MAX_NAMES} more" if len(ours) > MAX_NAMES else ""
    if len(known) == 1:
        return known[0]
    return f"one of {', '.join(known)}{more}" if known else "a name"


def _place(detail: Mapping[str, Any], tree: Any) -> tuple[KeyPath, bool]:
    """The place of an error in the tree, and whether it is in a branch of a union."""
    path: KeyPath = ()
    is_branch = False
    for segment in detail["loc"]:
        has_members = isinstance(tree, dict) and segment in tree
        is_branch = not has_members and not (isinstance(tree, list) and segment in range(len(tree)))
        if not is_branch:
            path = (*path, segment)
            tree = tree[segment]
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        return (*path, detail["loc"][-1]), False
    return path, is_branch


class _Words:
    """The message of a problem, from the schema and the value found."""

    def __init__(self, schema: Node, tree: Any, also_known: list[str]) -> None:
        self._schema = schema
        self._tree = tree
        self._also_known = also_known

    def problem(self, path: KeyPath, errors: Errors) -> Problem:
        types = {error["type"] for error in errors}
        if "extra_forbidden" in types:
            return Problem(path, self._unknown_key(path), "key")
        value: Any = self._tree
        for segment in path:
            if isinstance(value, dict) and segment not in value:
                return Problem(path, "required, but missing", "absence")
            value = value[segment]
        return Problem(path, self._message(path, value, errors, types))

    def _message(self, path: KeyPath, value: Any, errors: Errors, types: set[str]) -> str:
        for error in errors:
            if error["type"] in ("value_error", "assertion_error"):
                return str(error["ctx"]["error"])
        if "finite_number" in types:
            return f"expected a finite number, got {show(value)}"
        if "needs_python_object" in types:
            return "cannot be given in a recipe: it takes a Python object"
        nodes = self._nodes(path)
        if nodes and all(kind in _IN_SCHEMA or kind.endswith("_type") for kind in types):
            advice = hint(value, nodes) or self._beside(path, value)
            return f"expected {describe(nodes)}, got {show(value)}{advice}"
        return f"{errors[0]['msg'].replace('Input should be', 'expected')}, got {show(value)}"

    def _beside(self, path: KeyPath, value: Any) -> str:
        """The keys that a number or a mapping was meant for: those called after this one, as `warmup_steps` is."""
        if not path or isinstance(value, bool | str | None):
            return ""
        named = [f"{path[-1]}_{key}" for key in value] if isinstance(value, dict) else []
        members = [key for node in self._nodes(path[:-1]) for key in node.get("properties", {})]
        meant = [key for key in named if key in members] or [
            key
            for key in members
            if key.startswith(f"{path[-1]}_") and any(_fits(value, node) for node in self._nodes((*path[:-1], key)))
        ]
        return f"; set {join_or([dotted((*path[:-1], key)) for key in meant])} beside it" if meant else ""

    def _unknown_key(self, path: KeyPath) -> str:
        key = str(path[-1])
        beside = [known for node in self._nodes(path[:-1]) for known in node.get("properties", {})]
        sections = self._schema.get("properties", {})
        elsewhere = [f"{section}.{key}" for section in sections if self._nodes((section, key), exactly=True)]
        return unknown_key(key, [*(self._also_known if len(path) == 1 else []), *beside], elsewhere)

    def _nodes(self, path: KeyPath, exactly: bool = False) -> list[Node]:
        """What the schema allows at a place, one node per alternative; `exactly`: only as a listed key."""
        nodes = self._alternatives(self._schema)
        for segment in path:
            inner = [found for node in nodes for found in _inside(node, segment, exactly)]
            nodes = [end for node in inner for end in self._alternatives(node)]
        return nodes

    def _alternatives(self, node: Node) -> list[Node]:
        if "$ref" in node:
            return self._alternatives(self._schema["$defs"][node["$ref"].removeprefix("#/$defs/")])
        branches = node.get("anyOf") or node.get("oneOf") or node.get("allOf")
        return [end for branch in branches for end in self._alternatives(branch)] if branches else [node]


def _inside(node: Node, segment: str | int, exactly: bool) -> list[Node]:
    if isinstance(segment, str):
        members = node.get("properties", {})
        found = members.get(segment) if exactly else members.get(segment, node.get("additionalProperties"))
    else:
        first = node.get("prefixItems", [])
        found = first[segment] if segment < len(first) else node.get("items")
    return [found] if isinstance(found, dict) else []
