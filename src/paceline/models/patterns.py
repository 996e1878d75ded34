"""Patterns of tensor names: `backbone`, `backbone.*.bias`, `re:.*norm\\d`.

A pattern without `re:` is a glob that selects a tensor, or a module with everything inside; `*` matches dots too. One
with `re:` is a regular expression that must match the whole name, as in parameter groups.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import lru_cache

from paceline.core.text import join_first

_REGEX = "re:"


def matcher(pattern: str) -> Callable[[str], bool]:
    """A function that tells whether the pattern selects a name."""
    expression = _compile(pattern)
    return lambda name: expression.fullmatch(name) is not None


def select(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that the pattern selects, in their order."""
    expression = _compile(pattern)
    return [name for name in names if expression.fullmatch(name)]


def rename(pattern: str, replacement: str, names: Iterable[str]) -> dict[str, str]:
    """New names for those that the pattern selects; each `*` of a glob's replacement takes what it matched."""
    expression, template = _compile(pattern), replacement
    if not pattern.startswith(_REGEX):
        pieces, new_pieces = pattern.split("*"), replacement.replace("\\", r"\\").split("*")
        if len(new_pieces) > len(pieces):
            raise ValueError(f"replacement {replacement!r} of {pattern!r}: has more * than the pattern")
        expression = re.compile("(.*?)".join(map(re.escape, pieces)) + r"(\..*)?", re.DOTALL)
        template = new_pieces[0] + "".join(rf"\g<{n}>{each}" for n, each in enumerate(new_pieces[1:], start=1))
        template += rf"\g<{len(pieces)}>"  # what is inside a module
    try:
        return {name: found.expand(template) for name in names if (found := expression.fullmatch(name))}
    except (re.error, IndexError) as error:
        raise ValueError(f"replacement {replacement!r} of {pattern!r}: {error}") from error


def no_match(key: str, pattern: str, names: Iterable[str]) -> ValueError:
    """The error of a pattern that selects nothing, with the closest names."""
    known = list(names)
    candidates = list(dict.fromkeys(part for name in known for part in (*_parents(name), name)))
    written = pattern.removeprefix(_REGEX).strip("^$*.\\()")
    close = get_close_matches(written, candidates, n=3, cutoff=0.5)
    if close:
        return ValueError(f"{key} {pattern!r} matches no name; the closest are {', '.join(close)}")
    tops = list(dict.fromkeys(name.partition(".")[0] for name in known))
    starts = join_first(tops, 8) or "nothing: there are none"
    return ValueError(f"{key} {pattern!r} matches no name; names start with {starts}")


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether the tensor or module is one of the modules or inside one."""
    return any(not module or name == module or name.startswith(module + ".") for module in modules)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


@lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith(_REGEX):
        # The module's own name, or anything inside it; fnmatch anchors its result at the end.
        body = fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
        return re.compile(body + r"(?:\..*)?", re.DOTALL)
    try:
        return re.compile(pattern.removeprefix(_REGEX))
    except re.error as error:
        raise ValueError(f'"{pattern}" is not a regular expression: {error}') from error
