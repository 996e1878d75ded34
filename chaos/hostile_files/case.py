"""What a hostile file is: something that makes it, and the exit code that refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CANARY = Path("executed")
"""What appears when something in a file was run."""

Make = Callable[[], list[str]]
"""Makes a file in the current folder; the result is the arguments of a command that reads it."""


class Case(NamedTuple):
    """A file that is to be refused, and the exit code that says so."""

    name: str
    make: Make
    code: int


class Cases(list[Case]):
    """Cases of one kind; calling it with a name and an exit code decorates the function that makes the file."""

    def __call__(self, name: str, code: int) -> Callable[[Make], Make]:
        """Add a case."""

        def add(make: Make) -> Make:
            self.append(Case(name, make, code))
            return make

        return add
