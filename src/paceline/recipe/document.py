"""A recipe as a plain tree with the origin of each key and value, read from YAML or JSON.

YAML is read by the core schema of version 1.2 and within fixed limits.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel

from paceline.core.errors import RecipeError

KeyPath = tuple[str | int, ...]
"""A place in a tree: keys and list indices."""
COMMAND_LINE = "command line"
SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 1_000_000
MAX_ALIASES = 64
MAX_NODES = 20_000
MAX_DEPTH = 32
MAX_NUMBER = 64
"""Length of the longest number; anything longer is a string."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_WORDS: dict[str, bool | None] = {
    spelling: value
    for value, spellings in ((None, "~ null Null NULL"), (True, "true True TRUE"), (False, "false False FALSE"))
    for spelling in spellings.split()
}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"[-+]?0(x[0-9a-fA-F]+|o[0-7]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CONTROL = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
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


def dotted(path: KeyPath) -> str:
    """A place as users write it: `losses.0.weight`."""
    text = ".".join(str(segment) for segment in path)
    return text if text.isprintable() else ascii(text)[1:-1]


def read_document(path: Path, display: str | None = None, any_keys: bool = False) -> Document:
    """Read a YAML or JSON file, or raise all of its problems; `display` is the name they use.

    With `any_keys`, those that are numbers become text.
    """
    source = display or str(path)
    document = compose(_read_text(path, source), source, is_json=path.suffix.lower() == ".json", any_keys=any_keys)
    if document.tree is None:
        raise RecipeError(f"{source}: the file is empty; a recipe is a mapping of keys to values")
    if not isinstance(document.tree, dict):
        found = "a list" if isinstance(document.tree, list) else "a single value"
        raise RecipeError(f"{document.values[()]}: a recipe is a mapping of keys to values, got {found}")
    document.values[()] = Origin(source, 1, 1)
    return document


def parse_value(text: str, label: str) -> Document:
    """Parse a value of the command line; its problems start with `label`."""
    read, origin = compose(text, COMMAND_LINE, label), Origin(COMMAND_LINE)
    return Document(read.tree, dict.fromkeys(read.keys, origin), {(): origin} | dict.fromkeys(read.values, origin))


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
        before = error.object[: error.start].decode("utf-8-sig")
        problem = f"not UTF-8 text (byte 0x{error.object[error.start]:02x})"
        raise RecipeError(f"{_origin_after(before, source)}: {problem}") from None


def _as_yaml(text: str, source: str) -> str:
    """Check that text is valid JSON, and convert it to YAML: tabs and surrogate pairs differ."""
    try:
        json.loads(text, parse_int=float)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg[0].lower()}{error.msg[1:]}"
        raise RecipeError(f"{Origin(source, error.lineno, error.colno)}: {problem}") from None
    except RecursionError:
        raise RecipeError(f"{Origin(source, 1, 1)}: nested more than {MAX_DEPTH} deep") from None
    return _SURROGATE_PAIR.sub(_join_pair, text.replace("\t", " "))


def _join_pair(escape: re.Match[str]) -> str:
    if len(escape[0]) == 2:
        return escape[0]
    return f"\\U{ord(json.loads(chr(34) + escape[0] + chr(34))):08X}"


def resolve_scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar: `off` and `no` are strings, `1e-3` is a number."""
    if not text or text in _WORDS:
        return _WORDS.get(text)
    if len(text) > MAX_NUMBER:
        return text
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _origin_after(before: str, source: str) -> Origin:
    return Origin(source, before.count("\n") + 1, len(before) - before.rfind("\n"))


def compose(
    text: str, source: str, label: str | None = None, is_json: bool = False, any_keys: bool = False
) -> Document:
    """Parse one document; an empty text gives None. With `label`, problems have that instead of their place."""
    if is_json:
        text = _as_yaml(text, source)
    if control := _CONTROL.search(text):
        code = ord(control[0])
        message = f"control character U+{code:04X} is not allowed"
        if 0xDC80 <= code <= 0xDCFF:  # a byte of a command line
            message = f"not UTF-8 text (byte 0x{code - 0xDC00:02x}), as recipes are; use a link, for example"
        raise RecipeError(f"{label or _origin_after(text[: control.start()], source)}: {message}")
    composer = _Composer(text, source, label, is_json, any_keys)
    try:
        composer.read_stream()
    except _Stop:
        pass
    except yaml.MarkedYAMLError as error:
        composer.add_syntax_problem(error, text)
    if composer.problems:
        raise RecipeError(composer.problems)
    return composer.document


class _Stop(Exception):  # noqa: N818 - control flow
    """Parsing cannot continue; the reason is among the problems."""


class _Composer:
    """Follows the parser's events and collects problems."""

    def __init__(self, text: str, source: str, label: str | None, is_json: bool, any_keys: bool) -> None:
        self.document = Document(None)
        self.problems: list[str] = []
        self._source, self._label, self._is_json, self._any_keys = source, label, is_json, any_keys
        self._events: Iterator[Any] = yaml.parse(text, Loader=_Loader)
        self._anchors: dict[str, tuple[KeyPath, Any]] = {}
        self._open: set[str] = set()
        self._aliases = 0
        self._nodes = 0

    def read_stream(self) -> None:
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return
        self.document.tree = self._value(next(self._events), (), 1)
        next(self._events)
        if not isinstance(event := next(self._events), yaml.StreamEndEvent):
            self._stop(event, "a second document starts here; a recipe is one document")

    def _value(self, event: Any, path: KeyPath, depth: int) -> Any:
        self._count(event, depth)
        self.document.values[path] = self._origin(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path, depth)
        self._refuse_tag(event)
        opened = {event.anchor} - {None} - self._open
        self._open |= opened
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path, depth)
        else:
            value = self._mapping(path, depth)
        self._open -= opened
        if event.anchor is not None:
            self._anchors[event.anchor] = (path, value)
        return value

    def _scalar(self, event: Any) -> Any:
        if not event.implicit[0]:
            return event.value
        value = resolve_scalar(event.value)
        if self._is_json and value in ("NaN", "Infinity", "-Infinity"):
            self._problem(event, f"not valid JSON: expected a finite number, got {value}")
        return value

    def _sequence(self, path: KeyPath, depth: int) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*path, len(items)), depth + 1))
        return items

    def _mapping(self, path: KeyPath, depth: int) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, path, depth)
            inner = (*path, key)
            if key in tree:
                first = self.document.keys[inner]
                self._problem(event, f"{dotted(inner)}: given twice; first at {first.line}:{first.column}")
            else:
                self.document.keys[inner] = self._origin(event.start_mark)
            tree[key] = self._value(next(self._events), inner, depth + 1)
        return tree

    def _key(self, event: Any, path: KeyPath, depth: int) -> str:
        """The key; after a problem, a unique placeholder."""
        stand_in = f"?{event.start_mark.index}"
        if not isinstance(event, yaml.ScalarEvent):
            self._problem(event, "a key must be a string, not an alias, a list or a mapping")
            if not isinstance(event, yaml.AliasEvent):
                self._value(event, (*path, stand_in), depth + 1)
            return stand_in
        self._refuse_tag(event)
        is_plain, text = event.implicit[0], str(event.value)
        if is_plain and text == "<<":
            self._problem(event, "merge keys (<<) are not supported; use extends, or repeat the values")
            return stand_in
        if is_plain and not (self._any_keys and text) and not isinstance(resolve_scalar(text), str):
            self._problem(event, f'key {text} is not a string; quote it: "{text}"' if text else "a key is missing")
            return stand_in
        return text

    def _alias(self, event: Any, path: KeyPath, depth: int) -> Any:
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            self._stop(event, f"more than {MAX_ALIASES} aliases")
        if event.anchor in self._open:
            self._problem(event, f"alias *{event.anchor} is inside its own anchor")
            return None
        if event.anchor not in self._anchors:
            self._problem(event, f"alias *{event.anchor} has no anchor &{event.anchor} before it")
            return None
        source, value = self._anchors[event.anchor]
        for old in places(value, source):
            inside = old[len(source) :]
            if inside:  # keeps its place in the text; the alias itself has its own
                self._count(event, depth + len(inside))
                new = (*path, *inside)
                self.document.values[new] = self.document.values[old]
                if old in self.document.keys:
                    self.document.keys[new] = self.document.keys[old]
        return deepcopy(value)

    def _count(self, event: Any, depth: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._stop(event, f"more than {MAX_NODES:,} values, aliases expanded")
        if depth > MAX_DEPTH:
            self._stop(event, f"nested more than {MAX_DEPTH} deep")

    def _refuse_tag(self, event: Any) -> None:
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._problem(event, f"tag {tag} is not allowed; a recipe holds plain values only")

    def _problem(self, event: Any, message: str) -> None:
        self.problems.append(f"{self._label or self._origin(event.start_mark)}: {message}")

    def _stop(self, event: Any, message: str) -> NoReturn:
        self._problem(event, message)
        raise _Stop

    def add_syntax_problem(self, error: yaml.MarkedYAMLError, text: str) -> None:
        message, place = f"not valid YAML: {error.problem}", Origin(self._source, 1, 1)
        if mark := error.problem_mark or error.context_mark:
            place = self._origin(mark)
            if error.context and error.context_mark:
                message += f", {error.context} from line {error.context_mark.line + 1}"
            lines = text.split("\n")
            if mark.line < len(lines) and lines[mark.line][mark.column : mark.column + 1] == "\t":
                message += "; indent with spaces, not tabs"
            if error.problem == "found unknown escape character":
                message += "; write a Windows path in single quotes, or with /"
        self.problems.append(f"{self._label or place}: {message}")

    def _origin(self, mark: Any) -> Origin:
        return Origin(self._source, mark.line + 1, mark.column + 1)
