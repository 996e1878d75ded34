"""Which runs repeat one recipe, so that their metrics may be averaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.loggers.results import Result
from paceline.report.run_folders import settings_of

_NO_SETTINGS = re.compile(
    r"name|(logging|checkpoint|expect)\b.*|evaluate\.(?!original_size).*"
    r"|data\.(num_workers|loader|on_error|max_skipped)|train\.(device|devices|threads|hang_seconds)"
)
"""Keys that change neither training nor what is measured."""
_REPEATED = re.compile(
    r"train\.seed|data\.(train|val|test)(\.\w+)?\.(file|annotations|split|split_column|split_seed|\w*fold\w*)"
)
"""Keys in which the repetitions of one recipe differ: the seed, and which samples are held out."""
_LENGTH = ("train.epochs", "train.steps")

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Row:
    """A result, and what its run was trained with and measured on."""

    result: Result
    settings: dict[str, Any]
    data: str
    best: Result | None = None
    """The metrics of the best checkpoint, beside the last ones in `result`."""

    @property
    def recipe(self) -> str:
        """The same for runs of one recipe, whatever their seed, fold and length."""
        kept = {k: v for k, v in self.settings.items() if not _REPEATED.fullmatch(k) and k not in _LENGTH}
        return json.dumps(kept, sort_keys=True)

    @property
    def length(self) -> str:
        """How long the recipe trains."""
        given = {key.partition(".")[2]: self.settings.get(key) for key in _LENGTH}
        return " and ".join(f"{value:g} {unit}" for unit, value in given.items() if value is not None)

    @property
    def ended(self) -> float:
        """When the state of the run last changed."""
        status = self.result.folder / "status.json"
        return status.stat().st_mtime if status.is_file() else 0.0


def training_settings(tree: Any) -> dict[str, Any]:
    """The values of a recipe that change training or what is measured, by dotted key."""
    return {key: value for key, value in settings_of(tree) if not _NO_SETTINGS.fullmatch(key)}


def find_repetitions(rows: Sequence[Row]) -> tuple[list[list[Row]], list[tuple[Row, str]]]:
    """The runs to average: finished, of one recipe and length, each seed once; those left out, and why."""
    repetitions: list[list[Row]] = []
    left_out = []
    for similar in group_by(rows, lambda row: row.recipe):
        finished = [row for row in similar if row.result.state == "finished"]
        kept = []
        for same in group_by(finished, lambda row: json.dumps(row.settings, sort_keys=True)):
            last = max(same, key=lambda row: row.ended)
            why = f"repeats {last.result.folder}, which has the same seed and is newer"
            left_out += [(row, why) for row in same if row is not last]
            kept.append(last)
        means = [each for each in group_by(kept, lambda row: row.length) if len(each) > 1]
        repetitions += means
        if means:
            averaged = [row for each in means for row in each]
            lengths = ", ".join(each[0].length for each in means)
            left_out += [(row, f"trains {row.length}, not {lengths}") for row in kept if row not in averaged]
            left_out += [(row, f"is {row.result.state}") for row in similar if row not in finished]
    return repetitions, left_out


def group_by(items: Iterable[_Item], key: Callable[[_Item], object]) -> list[list[_Item]]:
    """The items with equal keys together, in their order."""
    groups: dict[object, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
