"""Milestones of a schedule behind the end of a run that the command line shortens, as `train.epochs=1` does."""

from __future__ import annotations

from typing import Any

from paceline.core.text import pluralize
from paceline.recipe.document import COMMAND_LINE, Document, Origin
from paceline.recipe.problems import show


def drop_unreached(document: Document) -> list[str]:
    """Leave out milestones of the recipe that the run does not reach, and a decay without any; a note for the user.

    Where the command line gives the length in another unit, only building finds out, and refuses.
    """
    schedule, train = document.tree.get("schedule"), document.tree.get("train")
    if not isinstance(schedule, dict) or schedule.get("decay") not in ("step", "multi_step"):
        return []
    for unit in ("epochs", "steps"):
        given = document.values.get(("train", unit))
        if given is None or given.source != COMMAND_LINE or not isinstance(train[unit], int):
            continue
        for key in {f"milestone_{unit}", f"every_{unit}"} & schedule.keys():
            origin = document.values.get(("schedule", key))
            if origin is not None and origin.source != COMMAND_LINE:
                left = _drop(document, schedule, key, train[unit], given)
                end = pluralize(train[unit], unit.removesuffix("s"))
                return [f"{origin}: schedule.{key}: {left} dropped, since the run ends after {end}"] if left else []
    return []


def _drop(document: Document, schedule: dict[str, Any], key: str, length: int, given: Origin) -> str:
    """What was left out."""
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
    return ", ".join(show(point) for point in points[len(reached) :])
