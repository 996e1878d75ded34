"""Environment variables that this process sets for torch and for the processes it starts, and puts back. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_before: dict[str, str | None] = {}


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables until the outermost `restored_variables` ends."""
    for name, value in variables.items():
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def set_missing_variables(variables: Mapping[str, str]) -> None:
    """The same for those that are not set yet."""
    set_variables({name: value for name, value in variables.items() if name not in os.environ})


@contextmanager
def restored_variables() -> Iterator[None]:
    """Put back what `set_variables` changes inside: a Python program that runs a command keeps its environment."""
    is_outermost = not _before
    try:
        yield
    finally:
        while is_outermost and _before:
            name, value = _before.popitem()
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
