"""Parse text to a plain tree with places, by the core schema of YAML 1.2 and within fixed limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

KeyPath = tuple[str | int, ...]
"""A place in a tree: keys and list indices."""
Place = tuple[int, int]
"""A place in a text: line and column, from 1."""

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


@dataclass
class Composed:
    """A tree, and where each of its keys and values starts."""

    tree: Any = None
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)


class Unreadable(Exception):  # noqa: N818 - always turned into a RecipeError
    """The text is invalid; `problems` says where and why."""

    def __init__(self, problems: list[tuple[Place, str]]) -> None:
        super().__init__(problems)
        self.problems = problems


def dotted(path: KeyPath) -> str:
    """A place as users write it: `losses.0.weight`."""
    text = ".".join(str(segment) for segment in path)
    return text if text.isprintable() else ascii(text)[1:-1]


def place_after(before: str) -> Place:
    """The place after this beginning of a text."""
    return before.count("\n") + 1, len(before) - before.rfind("\n")


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


def compose(text: str, is_json: bool = False) -> Composed:
    """Parse one document; an empty text gives None. `is_json` refuses what only YAML allows."""
    if control := _CONTROL.search(text):
        code = ord(control[0])
        message = f"control character U+{code:04X} is not allowed"
        if 0xDC80 <= code <= 0xDCFF:  # a byte of a command line
            message = f"not UTF-8 text (byte 0x{code - 0xDC00:02x}), as recipes are; use a link, for example"
        raise Unreadable([(place_after(text[: control.start()]), message)])
    composer = _Composer(text, is_json)
    try:
        composer.read_stream()
    except _Stop:
        pass
    except yaml.MarkedYAMLError as error:
        composer.problems.append(_syntax_problem(error, text))
    if composer.problems:
        raise Unreadable(composer.problems)
    return composer.composed


class _Stop(Exception):  # noqa: N818 - control flow
    """Parsing cannot continue; the reason is among the problems."""


class _Composer:
    """Follows the parser's events and collects problems."""

    def __init__(self, text: str, is_json: bool) -> None:
        self.composed = Composed()
        self.problems: list[tuple[Place, str]] = []
        self._is_json = is_json
        self._events: Iterator[Any] = yaml.parse(text, Loader=_Loader)
        self._anchors: dict[str, tuple[KeyPath, Any]] = {}
        self._open: set[str] = set()
        self._aliases = 0
        self._nodes = 0

    def read_stream(self) -> None:
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return
        self.composed.tree = self._value(next(self._events), (), 1)
        next(self._events)
        if not isinstance(event := next(self._events), yaml.StreamEndEvent):
            self._stop(event, "a second document starts here; a recipe is one document")

    def _value(self, event: Any, path: KeyPath, depth: int) -> Any:
        self._count(event, depth)
        self.composed.values[path] = _place(event)
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
                line, column = self.composed.keys[inner]
                self._problem(event, f"{dotted(inner)}: given twice; first at {line}:{column}")
            else:
                self.composed.keys[inner] = _place(event)
            tree[key] = self._value(next(self._events), inner, depth + 1)
        return tree

    def _key(self, event: Any, path: KeyPath, depth: int) -> str:
        """The key; after a problem, a unique placeholder."""
        stand_in = f"?{_place(event)}"
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
        if is_plain and not isinstance(resolve_scalar(text), str):
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
        return self._copy(value, source, path, event, depth)

    def _copy(self, value: Any, source: KeyPath, target: KeyPath, event: Any, depth: int) -> Any:
        """Repeat the anchored value at `target`; its content keeps its places in the text."""

        def child(segment: str | int, inner: Any) -> Any:
            self._count(event, depth + 1)
            old, new = (*source, segment), (*target, segment)
            self.composed.values[new] = self.composed.values[old]
            if isinstance(segment, str):
                self.composed.keys[new] = self.composed.keys[old]
            return self._copy(inner, old, new, event, depth + 1)

        if isinstance(value, dict):
            return {key: child(key, inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [child(index, inner) for index, inner in enumerate(value)]
        return value

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
        self.problems.append((_place(event), message))

    def _stop(self, event: Any, message: str) -> NoReturn:
        self._problem(event, message)
        raise _Stop


def _place(event: Any) -> Place:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _syntax_problem(error: yaml.MarkedYAMLError, text: str) -> tuple[Place, str]:
    message = f"not valid YAML: {error.problem}"
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return (1, 1), message
    if error.context and error.context_mark:
        message += f", {error.context} from line {error.context_mark.line + 1}"
    lines = text.split("\n")
    if mark.line < len(lines) and lines[mark.line][mark.column : mark.column + 1] == "\t":
        message += "; indent with spaces, not tabs"
    if error.problem == "found unknown escape character":
        message += "; write a Windows path in single quotes, or with /"
    return (mark.line + 1, mark.column + 1), message
