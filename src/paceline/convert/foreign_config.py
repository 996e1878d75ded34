"""A configuration file of another program, and which of its keys have been converted."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, create_model

from paceline.core.arguments import Arguments, NonNegative
from paceline.core.errors import RecipeError
from paceline.recipe.document import Document, KeyPath, Origin, children, compose, document_of, dotted
from paceline.recipe.problems import problems_of, show
from paceline.recipe.validate import nearest_origin, recipe_error

_BRACKETS = str.maketrans("()", "[]")


Keys = dict[str, tuple[Any, Any]]
"""Dotted keys of another program with their types, and what it takes for those that a file leaves out; …: required."""


def make_section(keys: Keys, closed: Collection[str] = (), name: str = "") -> type[Arguments]:
    """A section with these keys and sections inside; other keys are left to the remarks, but not in those `closed`."""
    fields = {key: described for key, described in keys.items() if "." not in key}
    for first in dict.fromkeys(key.partition(".")[0] for key in keys if "." in key):
        inside = {key.removeprefix(f"{first}."): keys[key] for key in keys if key.startswith(f"{first}.")}
        section = make_section(inside, closed, first)
        is_required = any(field.is_required() for field in section.model_fields.values())
        fields[first] = (section, ... if is_required else section())
    config = Arguments.model_config | ConfigDict(extra="forbid" if name in closed else "allow")
    return cast(type[Arguments], create_model(name or "File", __config__=config, **cast(Any, fields)))


def items(value: Any) -> list[Any]:
    """The items of a list, of a Python tuple, which YAML reads as text, or a single value."""
    if isinstance(value, str):
        with suppress(RecipeError):
            value = compose(value.translate(_BRACKETS), "").tree
    return value if isinstance(value, list) else [value]


def _numbers(value: Any) -> list[Any]:
    found = items(value)
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in found):
        raise ValueError(f"expected numbers, got {show(value)}")
    return found


AsNumbers = BeforeValidator(_numbers)
Numbers = Annotated[list[NonNegative], AsNumbers]
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[list[Text], BeforeValidator(items)]


def run_name(text: str) -> str:
    """The text as the name of a run."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:100] or "converted"


class ForeignConfig:
    """Reads keys by dotted name, remembers which were read, and collects remarks with file, line and column."""

    def __init__(self, document: Document, section: type[Arguments]) -> None:
        self.tree: dict[str, Any] = document.tree
        self.source = document.values[()].source
        self._document = document
        self._read: set[KeyPath] = set()
        self._remarks: list[tuple[Origin, str]] = []
        self._taken: dict[str, dict[str, Any]] = {}
        """By section, what keys that the file leaves out are taken to be."""
        try:
            self._checked = section.model_validate_json(json.dumps(document.tree))
        except ValidationError as error:
            raise recipe_error(problems_of(error, section, document.tree), document) from None

    def has(self, key: str) -> bool:
        """Whether the file has a key."""
        return tuple(key.split(".")) in self._document.values

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; without it `default`, or the other program's, with a remark unless that is None."""
        path, value = tuple(key.split(".")), cast(Any, self.tree)
        self._read.add(path)
        if self.has(key):
            for segment in path:
                value = value[segment]
            return value
        if default is None:
            default = self._default(path)
        if default is not None:
            self._taken.setdefault(key.rpartition(".")[0], {})[path[-1]] = default
        return default

    def items(self, key: str) -> list[Any]:
        """The items of a list, or of a Python tuple; those of lists inside it as well."""
        value = self.take(key)
        return [] if value is None else [inner for each in items(value) for inner in items(each)]

    def some(self, **keys: str) -> dict[str, Any]:
        """Those of the values that the file gives, by our keys."""
        found = {ours: self.take(key) for ours, key in keys.items() if self.has(key)}
        return {ours: value for ours, value in found.items() if value is not None}

    def error(self, key: str, message: str) -> RecipeError:
        """An error about a key, with its place or the nearest one above."""
        return RecipeError(f"{nearest_origin(self._document, tuple(key.split('.')))}: {key}: {message}")

    def remark(self, key: str, message: str) -> None:
        """Say something about a key, if the file has it."""
        if origin := self._document.keys.get(tuple(key.split("."))):
            self._remarks.append((origin, f"{key}: {message}"))

    def drop(self, reason: str, *keys: str) -> None:
        """Leave out keys that need no counterpart, and say why."""
        for key in keys:
            self._read.add(tuple(key.split(".")))
            self.remark(key, reason)

    def remarks(self) -> list[str]:
        """All remarks in the order of the file; a key that nothing has read has no counterpart."""
        unread = [
            (self._document.keys[path], f"{dotted(path)}: {self._why(path)}") for path in self._leaves((), self.tree)
        ]
        taken = [self._about_taken(section, values) for section, values in self._taken.items()]
        ordered = sorted([*self._remarks, *unread, *taken], key=lambda each: (each[0].line or 0, each[0].column or 0))
        return [f"{origin}: {message}" for origin, message in ordered]

    def document(self, recipe: dict[str, Any]) -> Document:
        """The recipe as a document whose mistakes are the file's."""
        return document_of(recipe, Origin(self._document.values[()].source, 1, 1))

    def _about_taken(self, section: str, values: dict[str, Any]) -> tuple[Origin, str]:
        found = ", ".join(f"{key} {show(value)}" for key, value in values.items())
        place = f"{section}: " if section else ""
        return nearest_origin(
            self._document, tuple(section.split("."))
        ), f"{place}taken, since not in the file: {found}"

    def _default(self, path: KeyPath) -> Any:
        value: Any = self._checked
        for segment in path:
            value = getattr(value, str(segment)) if segment in getattr(type(value), "model_fields", ()) else None
        return value

    def _why(self, path: KeyPath) -> str:
        is_known = self._default(path) is not None
        return "not needed: the other settings make no use of it" if is_known else "not converted: no counterpart"

    def _leaves(self, path: KeyPath, value: Any) -> Iterable[KeyPath]:
        if path in self._read:
            return
        if not isinstance(value, dict) or not value:
            yield path
            return
        for key, inner in children(value):
            yield from self._leaves((*path, key), inner)
