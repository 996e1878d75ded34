"""Read the metrics of runs from their directories, and write them to a results table."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.best import best_step
from paceline.core.errors import PacelineError
from paceline.core.regular_file import read_json
from paceline.loggers.events import Ended, Event, Logger, Record
from paceline.loggers.jsonl import metrics_of, read_records
from paceline.loggers.results_table import Value, update_rows


class About(NamedTuple):
    """Name, task and model of a run."""

    name: str
    task: str
    model: str


@dataclass(frozen=True)
class Result:
    """The metrics of a run on one split; None for values that are not finite."""

    about: About
    folder: Path
    split: str
    state: str
    step: int
    epoch: float
    num_samples: int
    num_skipped: int
    metrics: dict[str, float | None]
    settings: str = ""
    """Overrides given to `paceline eval`."""

    def labels(self, home: Path) -> dict[str, Value]:
        """The cells besides metrics; the directory is relative to the folder `home`."""
        return {
            "run": self.about.name,
            "directory": Path(os.path.relpath(os.path.realpath(self.folder), os.path.realpath(home))).as_posix(),
            "split": self.split,
            "settings": self.settings,
            "task": self.about.task,
            "model": self.about.model,
            "state": self.state,
            "step": self.step,
            "epoch": self.epoch,
            "num_samples": self.num_samples,
            "num_skipped": self.num_skipped,
        }


def write_results(table: Path, results: Sequence[Result]) -> None:
    """Update the rows of these results in a table; see `update_rows`."""
    home = Path(os.path.realpath(table)).parent
    rows = []
    for result in results:
        labels = result.labels(home)
        rows.append(labels | {name: value for name, value in result.metrics.items() if name not in labels})
    update_rows(table, rows)


def read_results(folder: Path, about: About, best: bool = False) -> list[Result]:
    """The last evaluation of each split of a run, or those of its best checkpoint."""
    return read_last_and_best(folder, about)[best]


def read_last_and_best(folder: Path, about: About) -> tuple[list[Result], list[Result]]:
    """The last evaluation of each split of a run, and those of its best checkpoint."""
    state, wanted = read_state(folder), best_step(folder)
    last: dict[str, Record] = {}
    best: dict[str, Record] = {}
    for record in read_records(folder / "metrics.jsonl"):
        if record["split"] != "train":
            last[record["split"]] = record
            if record["step"] == wanted:
                best[record["split"]] = record

    def results(found: dict[str, Record]) -> list[Result]:
        return [_result(folder, about, state, found[split]) for split in sorted(found, key=lambda name: name != "val")]

    return results(last), results(best)


def read_state(folder: Path) -> str:
    """The state in a run's status.json; "unknown" without one."""
    status = read_json(folder / "status.json")
    state = status.get("state") if isinstance(status, dict) else None
    return state if isinstance(state, str) else "unknown"


def read_main_metric(folder: Path) -> tuple[str, bool] | None:
    """The metric that a run is judged by and whether its greatest value is best; None if its status does not say."""
    status = read_json(folder / "status.json")
    name = status.get("main_metric") if isinstance(status, dict) else None
    return (name, status.get("direction") != "min") if isinstance(name, str) else None


def _result(folder: Path, about: About, state: str, record: Record) -> Result:
    epoch, num_samples, num_skipped = (_number(record.get(name)) for name in ("epoch", "num_samples", "num_skipped"))
    step, split = record["step"], record["split"]
    return Result(about, folder, split, state, step, epoch, int(num_samples), int(num_skipped), metrics_of(record))


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


class ResultsRow(Logger):
    """Updates a run's rows in a results table when it is finished.

    It reads what the other sinks wrote, so it comes after them. A table that cannot be written is a warning:
    `paceline results` can write it later.
    """

    def __init__(self, table: Path, folder: Path, about: About, warn: Callable[[str], None]) -> None:
        self._table, self._folder, self._about, self._warn = table, folder, about, warn

    def handle(self, event: Event) -> None:
        if not isinstance(event, Ended) or event.state != "finished":
            return
        try:
            write_results(self._table, read_results(self._folder, self._about))
        except PacelineError as error:
            self._warn(f"{error}. To retry: paceline results {self._folder} --out {self._table}")
