"""A configuration file of another program, and which of its keys have been converted."""

from __future__ import annotations

import re
from typing import Any, cast

from paceline.core.errors import RecipeError
from paceline.recipe.document import Document, Origin, children
from paceline.recipe.yaml_tree import KeyPath, dotted

_NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?")


class ForeignConfig:
    """Reads keys by dotted name, remembers which were read, and collects remarks with file, line and column."""

    def __init__(self, document: Document) -> None:
        self.tree: dict[str, Any] = document.tree
        self._document = document
        self._read: set[KeyPath] = set()
        self._remarks: list[tuple[Origin, str]] = []

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default of the other program."""
        path, value = tuple(key.split(".")), cast(Any, self.tree)
        for segment in path:
            if not isinstance(value, dict) or segment not in value:
                return default
            value = value[segment]
        self._read.add(path)
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """The same for a number; anything else is an error with its place."""
        value = self.take(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise RecipeError(f"{self._origin(key)}: {key}: expected a number, got {value!r}")
        return value

    def numbers(self, key: str) -> list[Any]:
        """The numbers of a list, or of a Python tuple, which YAML reads as text; [] without the key."""
        value = self.take(key, [])
        if isinstance(value, str):
            value = [float(text) if re.search("[.eE]", text) else int(text) for text in _NUMBER.findall(value)]
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int | float) for each in values):
            raise RecipeError(f"{self._origin(key)}: {key}: expected numbers, got {value!r}")
        return values

    def names(self, key: str) -> list[str]:
        """The words of a list, or of a Python tuple of strings."""
        value = self.take(key, [])
        return re.findall(r"[^\s(),'\"]+", value) if isinstance(value, str) else [str(each) for each in value]

    def remark(self, key: str, message: str) -> None:
        """Say something about a key, if the file has it."""
        if origin := self._document.keys.get(tuple(key.split("."))):
            self._remarks.append((origin, f"{key}: {message}"))

    def assume(self, key: str, value: float) -> Any:
        """A number that the file should have; without it the value, with a remark."""
        number = self.number(key)
        if number is None:
            origin = self._document.values[()]
            self._remarks.append((origin, f"{key}: not in the file; {value:g} is assumed"))
        return value if number is None else number

    def drop(self, reason: str, *keys: str) -> None:
        """Leave out keys that need no counterpart, and say why."""
        for key in keys:
            self.take(key)
            self.remark(key, reason)

    def remarks(self) -> list[str]:
        """All remarks in the order of the file; a key that nothing has read has no counterpart."""
        unread = [
            (self._document.keys[path], f"{dotted(path)}: not converted: no counterpart")
            for path in self._leaves(self.tree, ())
        ]
        ordered = sorted([*self._remarks, *unread], key=lambda each: (each[0].line or 0, each[0].column or 0))
        return [f"{origin}: {message}" for origin, message in ordered]

    def _leaves(self, value: Any, path: KeyPath) -> list[KeyPath]:
        if path in self._read:
            return []
        if isinstance(value, dict) and value:
            return [leaf for key, inner in children(value) for leaf in self._leaves(inner, (*path, key))]
        return [path]

    def _origin(self, key: str) -> Origin:
        return self._document.values.get(tuple(key.split(".")), self._document.values[()])
