"""Comparing things on a machine that others use too: short turns, taken in rotation, and medians of ratios."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Turn = Callable[[], float]
"""One measurement of one contestant; the result is its cost, in any unit."""


@dataclass(frozen=True)
class Measured:
    """The costs of one contestant, turn by turn."""

    name: str
    costs: list[float]

    @property
    def median(self) -> float:
        """The middle one of the costs."""
        return statistics.median(self.costs)

    def ratios(self, reference: Measured) -> list[float]:
        """Each cost over that of the reference in the same round, so that a slow moment slows both.

        The reference may have had further rounds.
        """
        return [cost / other for cost, other in zip(self.costs, reference.costs, strict=False)]


def interleave(turns: Mapping[str, Turn], rounds: int) -> dict[str, Measured]:
    """Give every contestant one turn a round, each time in another order; a first round is thrown away."""
    measured = {name: Measured(name, []) for name in turns}
    for number in range(rounds + 1):
        for name in rotated(list(turns), number):
            _say(f"round {number} of {rounds}: {name}" if number else f"warming up: {name}")
            cost = turns[name]()
            if number:
                measured[name].costs.append(cost)
    _say("")
    return measured


def _say(text: str) -> None:
    """Show on a terminal, in place, what is being measured."""
    if sys.stdout.isatty():
        print(f"\r{text:<100.100}\r", end="", flush=True)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names with another one first in each round, so that none always follows the same neighbor's heat."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def spread(values: Sequence[float]) -> str:
    """The middle half of the values, as "1.02–1.07"."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{low:.2f}–{high:.2f}"
