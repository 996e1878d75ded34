"""Decisions that depend on files: rank 0 makes them, and all ranks follow or raise the same error.

By itself each process may find something else: a run saves and removes checkpoints, files are edited and added, and
machines see a shared disk at different times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from paceline.core.errors import CheckpointError, DataError, PacelineError, UsageError
from paceline.core.world import World

_MOST_TIMES, _WAIT_SECONDS = 8, 0.2
_ERRORS = {error.exit_code: error for error in (PacelineError, UsageError, DataError, CheckpointError)}


class Identified(Protocol):
    """Something that was read from a file: its path, and a digest of its content."""

    @property
    def path(self) -> Path: ...

    @property
    def digest(self) -> str: ...


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
    found: Found | None = None

    def choose() -> tuple[str, str] | None:
        nonlocal found
        found = find()
        return None if found is None else (str(found.path.absolute()), found.digest)

    problem: str | None = None
    for attempt in range(_MOST_TIMES):
        time.sleep(_WAIT_SECONDS * attempt)  # a shared disk may show what is new a little later
        choice = decide(world, choose)
        if choice is None:
            return None
        own_problem = ""
        if not world.is_main:
            found, own_problem = _follow(*choice, follow)
        problem = first_problem(world, own_problem)
        if problem is None:
            return found
    raise CheckpointError(f"{problem}; is the folder the same for all machines?")


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
