"""Decisions that depend on files: rank 0 makes them, and all ranks follow or raise the same error.

By itself each process may find something else: a run saves and removes checkpoints, files are edited and added, and
machines see a shared disk at different times.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from paceline.core.errors import CheckpointError, DataError, PacelineError, UsageError
from paceline.core.world import World

_MOST_TIMES, _WAIT_SECONDS = 5, 0.2
_MOST_SECONDS = 60.0
_ERRORS = {error.exit_code: error for error in (PacelineError, UsageError, DataError, CheckpointError)}


class Identified(Protocol):
    """Something that was read from a file: its path, and a digest of its content."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def digest(self) -> str:
        """The same for the same content."""
        ...


Found = TypeVar("Found", bound=Identified)
Value = TypeVar("Value")


def decide(world: World, choose: Callable[[], Value]) -> Value:
    """What rank 0 chooses, on all ranks: a value that JSON can hold, or the same error."""
    if world.size == 1:
        return choose()
    answer: dict[str, Any] = {}
    if world.is_main:
        try:
            answer = {"value": choose()}
        except PacelineError as error:
            answer = {"error": str(error), "code": error.exit_code}
    answer = json.loads(gather_texts(world, json.dumps(answer))[0])
    if "error" in answer:
        raise _ERRORS.get(answer["code"], PacelineError)(answer["error"])
    value: Value = answer["value"]
    return value


def read_together(world: World, find: Callable[[], Found | None], follow: Callable[[Path], Found]) -> Found | None:
    """What rank 0 finds, read by every rank from the same path and with the same content.

    What was removed or replaced before all had read it is looked for again. Where that does not help, all end with
    the same error.
    """
    if world.size == 1:
        return find()
    choices = _Choices(find)
    while (choice := decide(world, choices.choose)) is not None:
        found, problem = (choices.found, "") if world.is_main else _follow(*choice, follow)
        choices.problem = first_problem(world, problem)
        if choices.problem is None:
            return found
    return None


class _Choices(Generic[Found]):
    """What rank 0 finds, repeatedly, until the other ranks can follow or clearly cannot."""

    def __init__(self, find: Callable[[], Found | None]) -> None:
        self._find = find
        self._times: Counter[str] = Counter()
        self._deadline = time.monotonic() + _MOST_SECONDS
        self.found: Found | None = None
        self.problem: str | None = None
        """Why a process could not follow the last choice."""

    def choose(self) -> tuple[str, str] | None:
        """Its path and digest; raises CheckpointError if other ranks cannot follow it, or nothing for long."""
        self.found = self._find()
        if self.found is None:
            return None
        digest = self.found.digest
        if self.problem and (self._times[digest] >= _MOST_TIMES or time.monotonic() > self._deadline):
            raise CheckpointError(f"{self.problem}; is the folder the same for all machines?")
        time.sleep(_WAIT_SECONDS * self._times[digest])  # a shared disk may show what is new a little later
        self._times[digest] += 1
        return str(self.found.path.absolute()), digest


def _follow(place: str, digest: str, follow: Callable[[Path], Found]) -> tuple[Found | None, str]:
    """What is found at the path, and what is wrong with it."""
    try:
        found = follow(Path(place))
    except PacelineError as error:
        return None, str(error)
    return found, "" if found.digest == digest else f"{place}: is not what the first process read there"


def check_same(world: World, value: Any, explain: Callable[[Any], str], error: type[PacelineError]) -> None:
    """Raise `error` on all ranks if one has another value than rank 0.

    `explain` is asked in those, given the value of the first, to tell what is different.
    """
    if world.size == 1:
        return
    first = decide(world, lambda: value)
    problem = first_problem(world, "" if json.loads(json.dumps(value)) == first else explain(first))
    if problem is not None:
        raise error(problem)


def first_problem(world: World, problem: str) -> str | None:
    """The first problem of any rank, equal on all ranks; None without problems."""
    problems = gather_texts(world, problem)
    return next((f"process {rank} of {world.size}: {text}" for rank, text in enumerate(problems) if text), None)


def gather_texts(world: World, text: str) -> list[str]:
    """The texts of all ranks, in rank order."""
    own = torch.frombuffer(bytearray(f"{text}\n".encode(errors="surrogatepass")), dtype=torch.uint8)
    return [bytes(each.tolist()).decode(errors="surrogatepass")[:-1] for each in world.gather(own)]
