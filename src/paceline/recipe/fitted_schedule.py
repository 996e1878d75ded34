"""A schedule whose warm-up or milestones do not fit a run that the command line shortens, as `train.epochs=1` does."""

from __future__ import annotations

from typing import Any

from paceline.core.text import pluralize
from paceline.recipe.document import COMMAND_LINE, Document, Origin
from paceline.recipe.problems import show


def fit_schedule(document: Document) -> list[str]:
    """Fit the recipe's schedule to a length that the command line gives; a note for the user on each change.

    Milestones that the run does not reach are left out, and a decay without any; a warm-up that fills the run takes
    half of it. Where the command line gives the length in another unit, only building finds out, and refuses.
    """
    schedule, train = document.tree.get("schedule"), document.tree.get("train")
    if not isinstance(schedule, dict) or not isinstance(train, dict):
        return []
    notes = []
    for unit in ("epochs", "steps"):
        given = document.values.get(("train", unit))
        if given is None or given.source != COMMAND_LINE or not isinstance(train[unit], int):
            continue
        end = pluralize(train[unit], unit.removesuffix("s"))
        for key in sorted({f"milestone_{unit}", f"every_{unit}", f"warmup_{unit}"} & schedule.keys()):
            origin = document.values.get(("schedule", key))
            if origin is None or origin.source == COMMAND_LINE:
                continue
            fit = _shorten if key.startswith("warmup") else _drop
            if change := fit(document, schedule, key, train[unit], given):
                notes.append(f"{origin}: schedule.{key}: {change}, since the run ends after {end}")
    return notes


def _shorten(document: Document, schedule: dict[str, Any], key: str, length: int, given: Origin) -> str:
    """What became of a warm-up that is as long as the run."""
    written, half = schedule[key], length / 2 if key == "warmup_epochs" else length // 2
    if not isinstance(written, int | float) or written < length or half <= 0:
        return ""
    schedule[key], document.values["schedule", key] = half, given
    return f"{show(written)} shortened to {show(half)}"


def _drop(document: Document, schedule: dict[str, Any], key: str, length: int, given: Origin) -> str:
    """What was left out."""
    if schedule.get("decay") not in ("step", "multi_step"):
        return ""
    points = schedule[key] if isinstance(schedule[key], list) else [schedule[key]]
    if not all(isinstance(point, int | float) for point in points):
        return ""  # refused later
    is_last_one_reached = schedule.get("count_from") == 1
    reached = [point for point in points if point < length or (point == length and is_last_one_reached)]
    if not reached:
        schedule["decay"] = "constant"  # as `schedule.decay=constant`, which drops the keys of the former decay
        document.values["schedule", "decay"] = given
    elif len(reached) < len(points):
        for index in range(len(reached), len(points)):
            document.forget(("schedule", key, index))
        schedule[key] = reached
    left = ", ".join(show(point) for point in points[len(reached) :])
    return f"{left} dropped" if left else ""
