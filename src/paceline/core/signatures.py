"""Arguments: read off a signature, written as JSON, and made again from JSON, which takes no torch."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial, reduce
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, create_model, model_validator
from pydantic.fields import FieldInfo

from paceline.core.arguments import Arguments, ArgumentsCheck, Row, check_of

# From Python 3.14 on, reading an annotation evaluates it, and fails for a name that only a type checker imports.
if sys.version_info >= (3, 14):
    from annotationlib import Format

    signature_of = partial(inspect.signature, annotation_format=Format.FORWARDREF)
    _annotations_of = partial(inspect.get_annotations, format=Format.FORWARDREF)
else:
    signature_of, _annotations_of = inspect.signature, inspect.get_annotations

Node = dict[str, Any]
"""The JSON Schema of one argument; those without a "default" are required."""

_TYPES: dict[str, Any] = {"boolean": bool, "integer": int, "number": float, "string": str, "null": None}
_BOUNDS = {
    "minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt", "pattern": "pattern",
    "minLength": "min_length", "maxLength": "max_length", "minItems": "min_length", "maxItems": "max_length",
    "minProperties": "min_length", "maxProperties": "max_length", "multipleOf": "multiple_of",
}  # fmt: skip


class _AnyArguments(Arguments):
    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def arguments_of(
    target: Callable[..., Any],
    supplied: Collection[str] = (),
    checks: Sequence[ArgumentsCheck] = (),
    filled_in: AbstractSet[str] = frozenset(),
) -> type[Arguments]:
    """The arguments of a class or function but those `supplied` by the builder; a default may tell the type.

    Those `filled_in` by the builder where a recipe leaves them out may be None.
    """
    parameters = {
        name: parameter
        for name, parameter in signature_of(target).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and name not in supplied
    }
    hints = _hints(target, parameters)
    for name in filled_in & parameters.keys():
        hints[name] = hints.get(name, Any) | None
        parameters[name] = parameters[name].replace(default=None)
    fields: dict[str, Any] = {
        name: (
            hints.get(name, _default_type(parameter)),
            FieldInfo() if parameter.default is parameter.empty else parameter.default,
        )
        for name, parameter in parameters.items()
    }
    return _model(f"{target.__name__}Arguments", _AnyArguments, fields, checks)


def _default_type(parameter: inspect.Parameter) -> Any:
    """The type of a default that is a number, a text or true; what may be anything has none, or None."""
    kind = type(parameter.default)
    return float | int if kind is int else kind if kind in (bool, float, str) else Any


def to_json(arguments: type[Arguments]) -> dict[str, Node]:
    """Each argument's JSON Schema, from which `from_json` makes the same arguments again."""
    schema = arguments.model_json_schema()
    if "$defs" in schema:
        raise TypeError(f"{arguments.__name__}: expected plain types, got {', '.join(schema['$defs'])}")
    return {name: _plain(node) for name, node in schema.get("properties", {}).items()}


def from_json(title: str, nodes: Mapping[str, Node], checks: Sequence[Row] = ()) -> type[Arguments]:
    """The arguments that `to_json` has written."""
    fields: dict[str, Any] = {name: (_annotation(node), _field(node)) for name, node in nodes.items()}
    return _model(title, Arguments, fields, [check_of(row) for row in checks])


def _hints(target: Callable[..., Any], names: Collection[str]) -> dict[str, Any]:
    """The annotations of these parameters; others may name what is not defined yet."""
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    annotations = {name: hint for name, hint in _annotations_of(function).items() if name in names}
    holder = SimpleNamespace(__annotations__=annotations)
    return get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)


def _model(
    title: str, base: type[Arguments], fields: dict[str, Any], checks: Sequence[ArgumentsCheck]
) -> type[Arguments]:
    def run_checks(self: Arguments) -> Arguments:
        values = dict(self)
        for check in checks:
            if problem := check.problem(values):
                raise ValueError(problem)
        return self

    validators: dict[str, Any] = {"run_checks": model_validator(mode="after")(run_checks)} if checks else {}
    return create_model(title, __base__=base, __validators__=validators, **fields)


def _plain(node: Any) -> Any:
    """A node without titles, and with paths as the strings that recipes write."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("format") == "path":
        node = {key: value for key, value in node.items() if key != "format"} | {"minLength": 1}
    return {key: value if key == "default" else _plain(value) for key, value in node.items() if key != "title"}


def _field(node: Node) -> FieldInfo:
    known = {key: node[key] for key in ("default", "description") if key in node}
    field: FieldInfo = Field(**known)
    return field


def _annotation(node: Node) -> Any:
    """The type that a node describes, with its bounds and checks."""
    bounds = {_BOUNDS[key]: bound for key, bound in node.items() if key in _BOUNDS}
    made = _type(node)
    for extra in [*([Field(**bounds)] if bounds else []), *map(check_of, node.get("checks", []))]:
        made = Annotated[made, extra]
    return made


def _type(node: Node) -> Any:
    if "anyOf" in node:
        return reduce(operator.or_, map(_annotation, node["anyOf"]))
    if "enum" in node or "const" in node:
        return Literal[tuple(node.get("enum", [node.get("const")]))]
    match node.get("type"):
        case "array":
            return list[_annotation(node["items"])]  # type: ignore[misc]
        case "object":
            names, values = {"type": "string"} | node.get("propertyNames", {}), node["additionalProperties"]
            return dict[_annotation(names), _annotation(values)]  # type: ignore[misc]
        case None:
            return Any
        case kind:
            return _TYPES[kind]
