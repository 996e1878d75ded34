"""Environment variables that this process sets for torch and for the processes it starts, and puts back. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_before: dict[str, str | None] = {}
_is_inside: list[bool] = []


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
    if _is_inside:
        yield
        return
    outside = dict(_before)  # set by a run that was built in this program, and still in use
    _before.clear()
    _is_inside.append(True)
    try:
        yield
    finally:
        for name, value in _before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _before.clear()
        _before.update(outside)
        _is_inside.clear()
