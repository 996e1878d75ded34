"""A recipe as a plain tree with the origin of each key and value."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.core.errors import RecipeError
from paceline.recipe.yaml_tree import (
    MAX_DEPTH,
    KeyPath,
    Unreadable,
    compose,
    dotted,
    place_after,
)

__all__ = [
    "COMMAND_LINE",
    "Document",
    "KeyPath",
    "Origin",
    "dotted",
    "parse_value",
    "read_document",
]

COMMAND_LINE = "command line"
SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 1_000_000

_SURROGATE_PAIR = re.compile(r"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|.)")


@dataclass(frozen=True)
class Origin:
    """File, line and column of a key or value; a higher `layer` (file or override) wins."""

    source: str
    line: int | None = None
    column: int | None = None
    layer: int = 0

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


@dataclass
class Document:
    """A tree, and the origin of each key and value in it; () is the root."""

    tree: Any
    keys: dict[KeyPath, Origin] = field(default_factory=dict)
    values: dict[KeyPath, Origin] = field(default_factory=dict)

    def forget(self, path: KeyPath) -> None:
        """Drop the origins of a value and everything below it."""
        for place in places(lookup(self.tree, path), path):
            self.keys.pop(place, None)
            self.values.pop(place, None)


def document_of(tree: Any, origin: Origin) -> Document:
    """A tree that is not read from a file."""
    origins = dict.fromkeys(places(tree, ()), origin)
    return Document(tree, {path: origin for path in origins if path and isinstance(path[-1], str)}, origins)


def are_named_parts(value: Any) -> bool:
    """Whether a value is a mapping of names to data sets, rather than one data set."""
    is_mapping = isinstance(value, dict) and bool(value) and "dataset" not in value
    return is_mapping and all(isinstance(each, dict | BaseModel) for each in value.values())


def children(value: Any) -> list[tuple[str | int, Any]]:
    """The items of a mapping, a section or a list with their keys or indices."""
    if isinstance(value, dict | BaseModel):
        return list(value.items() if isinstance(value, dict) else value)
    return list(enumerate(value)) if isinstance(value, list) else []


def lookup(tree: Any, path: KeyPath) -> Any:
    """The value at an existing place."""
    for segment in path:
        tree = getattr(tree, str(segment)) if isinstance(tree, BaseModel) else tree[segment]
    return tree


def places(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """The places of a value and of everything inside it."""
    yield path
    for segment, inner in children(value):
        yield from places(inner, (*path, segment))


def read_document(path: Path, display: str | None = None) -> Document:
    """Read a YAML or JSON file, or raise all of its problems; `display` is the name they use."""
    source = display or str(path)
    text = _read_text(path, source)
    is_json = path.suffix.lower() == ".json"
    try:
        composed = compose(_as_yaml(text) if is_json else text, is_json)
    except Unreadable as error:
        raise RecipeError([f"{Origin(source, *place)}: {message}" for place, message in error.problems]) from None
    if composed.tree is None:
        raise RecipeError(f"{source}: the file is empty; a recipe is a mapping of keys to values")
    if not isinstance(composed.tree, dict):
        found = "a list" if isinstance(composed.tree, list) else "a single value"
        raise RecipeError(
            f"{Origin(source, *composed.values[()])}: a recipe is a mapping of keys to values, got {found}"
        )
    composed.values[()] = (1, 1)
    keys, values = (
        {path: Origin(source, *place) for path, place in table.items()} for table in (composed.keys, composed.values)
    )
    return Document(composed.tree, keys, values)


def parse_value(text: str, label: str) -> Document:
    """Parse a value of the command line; its problems start with `label`."""
    try:
        composed = compose(text)
    except Unreadable as error:
        raise RecipeError([f"{label}: {message}" for _, message in error.problems]) from None
    origin = Origin(COMMAND_LINE)
    return Document(
        composed.tree,
        dict.fromkeys(composed.keys, origin),
        {(): origin} | dict.fromkeys(composed.values, origin),
    )


def _read_text(path: Path, source: str) -> str:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise RecipeError(f"{source}: is a directory; expected a .yaml or .json file")
        if not stat.S_ISREG(status.st_mode):
            raise RecipeError(f"{source}: is not a regular file")
        if status.st_size > MAX_BYTES:
            raise RecipeError(f"{source}: {status.st_size:,} bytes; a recipe has at most {MAX_BYTES:,}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise RecipeError(f"{source}: no such file") from None
    except OSError as error:
        raise RecipeError(f"{source}: cannot be read: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = place_after(error.object[: error.start].decode("utf-8-sig"))
        problem = f"not UTF-8 text (byte 0x{error.object[error.start]:02x})"
        raise RecipeError(f"{Origin(source, *place)}: {problem}") from None


def _as_yaml(text: str) -> str:
    """Check that text is valid JSON, and convert it to YAML: tabs and surrogate pairs differ."""
    try:
        json.loads(text, parse_int=float)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg[0].lower()}{error.msg[1:]}"
        raise Unreadable([((error.lineno, error.colno), problem)]) from None
    except RecursionError:
        raise Unreadable([((1, 1), f"nested more than {MAX_DEPTH} deep")]) from None
    return _SURROGATE_PAIR.sub(_join_pair, text.replace("\t", " "))


def _join_pair(escape: re.Match[str]) -> str:
    if len(escape[0]) == 2:
        return escape[0]
    return f"\\U{ord(json.loads(chr(34) + escape[0] + chr(34))):08X}"
