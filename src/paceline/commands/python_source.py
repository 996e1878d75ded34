"""Python source: expressions that are laid out as formatters do, and the imports that they need."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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

    def named(self, name: str) -> Code:
        """As a keyword argument."""
        return self.after(f"{name}=")

    def after(self, text: str) -> Code:
        """Behind a text, such as an assignment."""
        return self._replace(opening=text + self.opening)


def call(function: str, *items: Code | str, **named: Code | str) -> Code:
    """A call with these arguments."""
    given = [as_code(each) for each in items] + [as_code(each).named(name) for name, each in named.items()]
    return Code(f"{function}(", given, ")")


def as_code(code: Code | str) -> Code:
    """Code as it is; a text is an expression."""
    return Code(code) if isinstance(code, str) else code


def value(given: Any) -> Code:
    """A value of a recipe: text, number, list, mapping or path; code may be inside."""
    if isinstance(given, Code):
        return given
    if isinstance(given, Mapping):
        items = [value(each).after(f"{value(key)}: ") for key, each in given.items()]
        return Code("{", items, "}")
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
    together = inner + ", ".join(map(str, code.items))
    is_call = re.search(r"\w\($", code.opening)
    if is_call and len(together) <= WIDTH:
        lines = [together]
    else:
        lines = [each for item in code.items for each in layout(item, inner, ",")]
    return [indent + code.opening, *lines, f"{indent}{code.closing}{end}"]


class Imports:
    """The names that a file takes from modules; two modules' name that is the same gets another for the second."""

    def __init__(self, taken: Sequence[str]) -> None:
        self._taken = set(taken)
        self._names: dict[tuple[str, str], str] = {}

    def name(self, module: str, name: str, known: str = "", kind: str = "") -> str:
        """What the file calls a name of a module: the same, or `known`; if that is taken, of which `kind` it is too."""
        if (module, name) in self._names:
            return self._names[module, name]
        known = known or name
        while known in self._taken:
            known += kind.title() if known[0].isupper() else f"_{kind or module.rpartition('.')[2]}"
        self._taken.add(known)
        self._names[module, name] = known
        return known

    def lines(self, only: Sequence[str] | None = None, without: Sequence[str] = ()) -> list[str]:
        """The statements in the usual order: of some packages, or of all but some."""
        found: dict[tuple[str, str], list[str]] = {}
        for (module, name), known in self._names.items():
            package = module.partition(".")[0]
            if package not in without and (only is None or package in only):
                is_same = name == known  # formatters give others a line of their own
                found.setdefault((module, "" if is_same else name), []).append(
                    name if is_same else f"{name} as {known}"
                )
        return [line for module, other in sorted(found) for line in _import(module, found[module, other])]


def _import(module: str, names: list[str]) -> list[str]:
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= WIDTH:
        return [line]
    return [f"from {module} import (", *(f"{INDENT}{name}," for name in ordered), ")"]
