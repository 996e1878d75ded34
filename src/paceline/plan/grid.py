"""Rows of a plan: what a recipe needs with other settings, and the largest micro-batch that fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.errors import PacelineError
from paceline.plan.memory import Memory
from paceline.plan.rehearse import Rehearsal, rehearse
from paceline.plan.surrogate import Shape
from paceline.recipe.load import load
from paceline.recipe.validate import validate

_MOST = 2**20  # samples of a micro-batch: beyond, nobody asks


@dataclass(frozen=True)
class Row:
    """What one combination of settings needs on each device."""

    settings: Mapping[str, str]
    """The recipe keys in which rows differ, and "procs"."""
    micro_batch_size: int
    memory: Memory
    largest_micro_batch: int | None = None
    """The most samples of a micro-batch that fit; None without a limit, 0 if not even one fits."""
    missing: str = ""
    """Why samples were assumed rather than read; empty if they were read."""

    def fits(self, limit: int) -> bool:
        """Whether the row needs no more than `limit` bytes."""
        return self.memory.total <= limit


@dataclass(frozen=True)
class Refused:
    """A combination that the recipe cannot have, and why."""

    settings: Mapping[str, str]
    reason: str


def split_choices(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides with one value, and those with several, as in `train.precision=fp32,bf16`."""
    fixed, choices = [], {}
    for override in overrides:
        key, _, value = override.partition("=")
        if "," in value and not value.startswith(("[", "{", '"', "'")):
            choices[key] = value.split(",")
        else:
            fixed.append(override)
    return fixed, choices


def combinations(choices: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every combination of the choices, the last key changing fastest."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def plan_row(
    reference: str, fixed: Sequence[str], settings: Mapping[str, str], limit: int | None, shape: Shape
) -> Row | Refused:
    """What a recipe needs with these settings; with a `limit` in bytes, also the largest micro-batch within it."""
    chosen = [f"{key}={value}" for key, value in settings.items() if key != "procs"]
    try:
        checked = validate(load(reference, [*fixed, *chosen, "model.weights=null", "train.compile=false"]))
        with rehearse(checked, int(settings["procs"]), shape) as rehearsal:
            size = rehearsal.micro_batch_size
            memory = rehearsal.step(size, rehearsal.num_micro_batches)
            largest = None if limit is None else largest_micro_batch(rehearsal, memory, limit)
            return Row(settings, size, memory, largest, rehearsal.missing)
    except PacelineError as error:
        return Refused(settings, str(error))


def largest_micro_batch(rehearsal: Rehearsal, known: Memory, limit: int) -> int:
    """The most samples of a micro-batch whose step takes at most `limit` bytes; 0 if one sample takes more.

    Memory grows about evenly with samples, so each guess is made by the line through the last two steps, and tried.
    """
    number = rehearsal.num_micro_batches
    tried = {rehearsal.micro_batch_size: known.total}

    def take(size: int) -> int:
        if size not in tried:
            tried[size] = rehearsal.step(size, number).total
        return tried[size]

    fitting, failing = 0, _MOST + 1
    size = rehearsal.micro_batch_size
    for _ in range(_MOST.bit_length()):
        if take(size) <= limit:
            fitting = max(fitting, size)
        else:
            failing = min(failing, size)
        if failing - fitting <= 1:
            break
        size = min(max(_guess(tried, limit), fitting + 1), failing - 1)
    return fitting


def _guess(tried: Mapping[int, int], limit: int) -> int:
    """Where the line through the two steps nearest to the limit reaches it."""
    if len(tried) == 1:
        ((size, _),) = tried.items()
        return 2 * size
    (one, low), (other, high) = sorted(tried.items(), key=lambda item: abs(item[1] - limit))[:2]
    slope = (high - low) / (other - one)
    return int(one + (limit - low) / slope) if slope > 0 else 2 * max(tried)
