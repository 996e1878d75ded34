"""Python source: expressions that are laid out as formatters do, and the imports that they need."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 110
INDENT = "    "


class Code(NamedTuple):
    """An expression: all of it, or what comes before its items, the items, and what comes behind them."""

    opening: str
    items: Sequence[Code] = ()
    closing: str = ""

    def __str__(self) -> str:
        return self.opening + ", ".join(map(str, self.items)) + self.closing

    def after(self, text: str) -> Code:
        """Behind a text, such as an assignment."""
        return self._replace(opening=text + self.opening)


def call(function: str, *items: Code | str, **named: Any) -> Code:
    """A call: of expressions by position, and of values or expressions by name."""
    given = [each if isinstance(each, Code) else Code(each) for each in items]
    return Code(f"{function}(", [*given, *(value(each).after(f"{name}=") for name, each in named.items())], ")")


def value(given: Any) -> Code:
    """A value of a recipe: text, number, list, mapping or path; code may be inside."""
    if isinstance(given, Code):
        return given
    if isinstance(given, Mapping):
        return Code("{", [value(each).after(f"{value(key)}: ") for key, each in given.items()], "}")
    if isinstance(given, list | tuple):
        opening, closing = ("[", "]") if isinstance(given, list) else ("(", ",)" if len(given) == 1 else ")")
        return Code(opening, [value(each) for each in given], closing)
    if isinstance(given, Path):
        return call("Path", value(str(given)))
    text = repr(given)
    return Code(f'"{text[1:-1]}"' if text.startswith("'") and '"' not in text else text)


def layout(code: Code, indent: str = "", end: str = "") -> list[str]:
    """The lines of a statement: one if that fits, else, of a call, its items on a line of their own, else one each."""
    line = f"{indent}{code}{end}"
    if len(line) <= WIDTH or not code.items:
        return [line]
    inner = indent + INDENT
    lines = [inner + ", ".join(map(str, code.items))]
    if len(lines[0]) > WIDTH or not re.search(r"\w\($", code.opening):
        lines = [each for item in code.items for each in layout(item, inner, ",")]
    return [indent + code.opening, *lines, f"{indent}{code.closing}{end}"]


class Imports:
    """The names that a file takes from modules; a name that is taken already gets another."""

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = set(taken)
        self._names: dict[tuple[str, str], str] = {}

    def name(self, module: str, name: str, kind: str = "") -> str:
        """What the file calls a name of a module: the same, or if that is taken, of which `kind` it is too."""
        known = name
        if (module, name) not in self._names:
            while known in self._taken:
                known += kind.title() if known[0].isupper() else f"_{kind or module.rpartition('.')[2]}"
            self._taken.add(known)
            self._names[module, name] = known
        return self._names[module, name]

    def lines(self, packages: Collection[str] | None = None, without: Collection[str] = ()) -> list[str]:
        """The statements in the usual order: of these packages, or of all but some."""
        found: dict[tuple[str, str], list[str]] = {}
        for (module, name), known in self._names.items():
            package = module.partition(".")[0]
            if package not in without if packages is None else package in packages:
                renamed = "" if name == known else name  # formatters give these a line of their own
                found.setdefault((module, renamed), []).append(f"{name} as {known}" if renamed else name)
        return [line for module, other in sorted(found) for line in _import(module, found[module, other])]


def _import(module: str, names: list[str]) -> list[str]:
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= WIDTH:
        return [line]
    return [f"from {module} import (", *(f"{INDENT}{name}," for name in ordered), ")"]
