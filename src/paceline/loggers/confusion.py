"""`tables/SPLIT-confusion.json`: the confusion matrix of the last evaluation of each split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.atomic_write import replace_file
from paceline.core.regular_file import open_regular
from paceline.loggers.events import Evaluated, Event, Logger

_MAX_CLASSES = 100  # more are only drawn: nobody reads a table of ten thousand cells
_MAX_BYTES = 1 << 20
_SUFFIX = "-confusion.json"


class ConfusionFile(Logger):
    """Writes the confusion matrix of each evaluation that has one: rows are true classes, columns predicted ones."""

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self._folder = folder
        self._classes = list(classes)

    def handle(self, event: Event) -> None:
        """Replace the file of an evaluated split."""
        if not isinstance(event, Evaluated) or event.confusion is None or len(event.confusion) > _MAX_CLASSES:
            return
        self._folder.mkdir(exist_ok=True)
        table = {"step": event.step, "classes": self._classes, "counts": event.confusion}
        content = json.dumps(table, ensure_ascii=False).encode(errors="backslashreplace")
        replace_file(self._folder / f"{event.split}{_SUFFIX}", content, is_durable=False)


def read_confusion(folder: Path) -> dict[str, dict[str, Any]]:
    """The confusion matrices of a run by split: "step", "classes" and "counts"; without damaged files."""
    found = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            with open_regular(path) as file:
                table = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        if _is_table(table):
            found[path.name.removesuffix(_SUFFIX)] = table
    return found


def _is_table(table: Any) -> bool:
    if not isinstance(table, dict) or type(table.get("step")) is not int:
        return False
    classes, counts = table.get("classes"), table.get("counts")
    if not isinstance(classes, list) or not isinstance(counts, list) or len(classes) != len(counts):
        return False
    is_square = all(isinstance(row, list) and len(row) == len(classes) for row in counts)
    return is_square and all(type(count) is int for row in counts for count in row)
