"""The search space of a sweep: the values that overrides give to keys, and the trials of a grid or of random draws.

A value is what an override of `paceline train` takes, so lists, mappings and quoted text keep their commas; several
values are separated by commas outside of them. Ranges need no character that a shell would take for its own.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import RecipeError, UsageError, in_one_line
from paceline.recipe.document import COMMAND_LINE

MAX_TRIALS = 1000
_DRAWS_PER_TRIAL = 100  # until a new combination is found
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_INTEGER = re.compile(r"[-+]?\d+")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|' r"'(?:''|[^'])*'", re.DOTALL)
_DIGITS = 4


@dataclass(frozen=True)
class Choices:
    """A key and its values, as they are written."""

    key: str
    values: tuple[str, ...]

    def draw(self, share: float) -> str:
        """The value at a share, 0 ≤ share < 1, of all of them."""
        return self.values[int(share * len(self.values))]


@dataclass(frozen=True)
class Range:
    """A key and the bounds of its values: integers if both bounds are; the logarithm is uniform with `is_log`."""

    key: str
    low: float
    high: float
    is_log: bool
    is_integer: bool

    def draw(self, share: float) -> str:
        """The value at a share, 0 ≤ share < 1, of the range; four digits are enough to compare."""
        low, high = self.low, self.high + self.is_integer
        value = low * (high / low) ** share if self.is_log else low + share * (high - low)
        if self.is_integer:
            return str(min(math.floor(value), int(self.high)))
        return repr(min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high))


@dataclass(frozen=True)
class SearchSpace:
    """The overrides of a sweep in the order given: axes that take several values, and text that all trials share."""

    parts: tuple[str | Choices | Range, ...]

    @property
    def shared(self) -> list[str]:
        """The overrides of every trial."""
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def axes(self) -> list[Choices | Range]:
        """The keys that are searched over."""
        return [part for part in self.parts if not isinstance(part, str)]

    def overrides(self, trial: Sequence[str]) -> list[str]:
        """All overrides of a trial in the order given, from its own `key=value`."""
        own = iter(trial)
        return [part if isinstance(part, str) else next(own) for part in self.parts]

    def grid(self) -> list[tuple[str, ...]]:
        """A trial for each combination, as its own `key=value`; the last key changes fastest."""
        choices = [axis for axis in self.axes if isinstance(axis, Choices)]
        for axis in self.axes:
            if isinstance(axis, Range):
                raise UsageError(f"{axis.key}: a range needs --samples N; a grid takes values, as in {axis.key}=1,2")
        size = math.prod(len(axis.values) for axis in choices)
        if size > MAX_TRIALS:
            raise UsageError(f"the grid has {size:,} trials, more than {MAX_TRIALS:,}; draw some with --samples N")
        pairs = [[f"{axis.key}={value}" for value in axis.values] for axis in choices]
        return list(itertools.product(*pairs))

    def sample(self, number: int, seed: int) -> list[tuple[str, ...]]:
        """Different random trials; a greater number begins with the same ones."""
        if not 1 <= number <= MAX_TRIALS:
            raise UsageError(f"--samples: expected a number from 1 to {MAX_TRIALS:,}, got {number:,}")
        rng, found = random.Random(seed), dict[tuple[str, ...], None]()
        for _ in range(number * _DRAWS_PER_TRIAL):
            found[tuple(f"{axis.key}={axis.draw(rng.random())}" for axis in self.axes)] = None
            if len(found) == number:
                return list(found)
        raise UsageError(f"--samples {number}: found only {len(found)} different trials; ask for fewer")


def read_search_space(overrides: Sequence[str]) -> SearchSpace:
    """The search space that overrides describe; all mistakes are raised at once."""
    parts: list[str | Choices | Range] = []
    problems: list[str] = []
    for override in overrides:
        try:
            parts.append(_part(override))
        except UsageError as error:
            problems.append(f"{COMMAND_LINE}: {in_one_line(override)}: {error}")
    space = SearchSpace(tuple(parts))
    keys = [axis.key for axis in space.axes]
    given = [*keys, *(text.partition("=")[0].strip() for text in space.shared)]
    problems += [f"{COMMAND_LINE}: {key}: given more than once" for key in keys if given.count(key) > 1]
    if "name" in keys:
        problems.append(f"{COMMAND_LINE}: name: each trial gets a name of its own; give one for all, or none")
    if problems:
        raise RecipeError(problems)
    if not keys:
        raise UsageError("nothing to search over: give a key several values, as in optimizer.lr=0.1,0.01")
    return space


def _part(override: str) -> str | Choices | Range:
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals:
        raise UsageError("expected key=value, or key=a,b,c")
    if found := _RANGE.fullmatch(text):
        return _range(key, *found.groups())
    values = split_values(text)
    if len(values) == 1:
        return override
    if not all(values):
        raise UsageError("expected a value on both sides of each comma")
    doubled = [value for value in values if values.count(value) > 1]
    if doubled:
        raise UsageError(f"{doubled[0]} is given more than once")
    return Choices(key, tuple(values))


def _range(key: str, log: str | None, first: str, last: str) -> Range:
    low, high = float(first), float(last)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"expected a range from a lower to a higher number, got {first}..{last}")
    if log and low <= 0:
        raise UsageError(f"a logarithmic range needs bounds > 0, got {first}")
    return Range(key, low, high, log is not None, all(_INTEGER.fullmatch(bound) for bound in (first, last)))


def split_values(text: str) -> list[str]:
    """The pieces between commas outside of brackets, braces and quotes."""
    pieces, depth, place, is_start = [""], 0, 0, True
    while place < len(text):
        # As in YAML, a quote inside a word is an apostrophe.
        quoted = _QUOTED.match(text, place) if is_start else None
        token = quoted[0] if quoted else text[place]
        place += len(token)
        depth += (token in "[{") - (token in "]}")
        is_start = token in "[{,:" or (is_start and token.isspace())
        if token == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += token
    return [piece.strip() for piece in pieces]
