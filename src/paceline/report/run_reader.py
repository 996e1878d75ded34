"""What a run directory tells about its run, as plain values for the page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError, UsageError
from paceline.core.file_lock import is_seen_everywhere, try_lock
from paceline.core.regular_file import open_regular, read_json
from paceline.core.text import doubled_loss
from paceline.data.skip_list import parse_skipped
from paceline.loggers.files import read_confusion, read_starts
from paceline.loggers.jsonl import RecordReader
from paceline.loggers.results import read_main_metric
from paceline.report.history import History, is_number, thinned
from paceline.report.images import ImageFolder, read_worst
from paceline.report.run_folders import data_of, is_run, read_recipe
from paceline.report.verdict import expectations, judge

Json = dict[str, Any]

_ORIGIN = re.compile(r"(?P<text>.*?\S) {2,}# (?P<origin>[^\"]*)")
_MAX_SKIPPED, _MAX_STARTS, _MAX_CLASSES = 200, 100, 1000
_MAX_SKIPPED_BYTES = 1 << 22
_FILES = ("recipe.yaml", "status.json", "metrics.jsonl", "skipped.jsonl", "logs/starts.jsonl")
_FOLDERS = ("images", "tables", "worst")


class RunReader:
    """Reads a run directory, again and again: of `metrics.jsonl` and the images only what is new."""

    def __init__(self, folder: Path) -> None:
        if not is_run(folder):
            what = "is not a run directory" if folder.is_dir() else "is not a folder"
            raise UsageError(f"{folder} {what}: expected a folder that `paceline train` wrote, with recipe.yaml")
        self.folder = folder
        self._records = RecordReader(folder / "metrics.jsonl")
        self._history = History()
        self._images = ImageFolder(folder / "images")

    def read(self, max_image_bytes: int) -> Json:
        """All that the page shows of the run."""
        if self._records.is_replaced():
            self._history = History()
        for record in self._records.read():
            self._history.add(record)
        about, tree = read_recipe(self.folder)
        status = _read_status(self.folder)
        starts = read_starts(self.folder / "logs" / "starts.jsonl")
        main = judge(self._history, read_main_metric(self.folder), tree)
        higher = next((each["higher_is_better"] for each in reversed(starts) if "higher_is_better" in each), None)
        return {
            **about._asdict(),
            "folder": str(self.folder),
            **status,
            **self._curves(),
            **main,
            "data": data_of(tree, main["main"]["split"]),
            "expect": expectations(self._history, tree.get("expect"), higher, main["main"]),
            **self._tables({main["best"]["step"]} if main["best"] else set()),
            "confusion": read_confusion(self.folder / "tables"),
            "images": [image._asdict() for image in self._images.read(max_image_bytes * 3 // 4)],
            "worst": read_worst(self.folder / "worst", self._images, max_image_bytes // 4),
            "recipe": list(_recipe_lines(self.folder / "recipe.yaml")),
            "starts": starts[-_MAX_STARTS:],
            "skipped": _read_skipped(self.folder / "skipped.jsonl"),
        }

    def state(self) -> list[tuple[int, int] | str]:
        """What changes with the content of the directory: times and sizes of its files, and whether it still runs."""
        return [*(_stamp(self.folder / name) for name in (*_FILES, *_FOLDERS)), _read_status(self.folder)["state"]]

    def _curves(self) -> Json:
        series = [
            {"split": split, "metric": metric, **_columns(each.points())}
            for (split, metric), each in self._history.series.items()
        ]
        return {
            "series": series,
            "times": _columns(self._history.times.points(), digits=13),
            "steps_per_epoch": self._history.steps_per_epoch,
        }

    def _tables(self, kept_steps: set[int]) -> Json:
        last = self._history.last()
        hidden = {doubled_loss({n: v or 0.0 for n, v in each.metrics.items()}) for each in last.values()}
        hidden = hidden if len(hidden) == 1 else set()
        evaluations, classes = [], {}
        for split, own in self._history.evaluations.items():
            for each in thinned(own, kept_steps):
                metrics = {n: _rounded(v) for n, v in each.metrics.items() if "." not in n and n not in hidden}
                evaluations.append({**asdict(each), "metrics": metrics})
            dotted = [(n, _rounded(v)) for n, v in own[-1].metrics.items() if "." in n]
            if dotted:
                classes[split] = dict(dotted[:_MAX_CLASSES])
        return {"evaluations": evaluations, "classes": classes}


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _columns(points: list[tuple[int, float | None]], digits: int = 6) -> Json:
    return {"x": [step for step, _ in points], "y": [_rounded(value, digits) for _, value in points]}


def _rounded(value: float | None, digits: int = 6) -> float | None:
    """A number as short as it is still read the same on a screen."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def _read_status(folder: Path) -> Json:
    status = read_json(folder / "status.json")
    status = status if isinstance(status, dict) else {}
    state, reason = status.get("state"), status.get("reason")
    numbers = {name: status.get(name) for name in ("step", "total_steps", "epoch")}
    return {
        "state": _state(folder, state) if isinstance(state, str) else "unknown",
        "reason": reason if isinstance(reason, str) else None,
        **{name: value if is_number(value) else None for name, value in numbers.items()},
    }


def _state(folder: Path, state: str) -> str:
    """The state in `status.json`; "killed" if it is "running" and its lock is held by no process anywhere."""
    if state != "running" or not is_seen_everywhere(folder):
        return state
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return "killed"
    try:
        return "killed" if try_lock(descriptor, shared=True) else state
    finally:
        os.close(descriptor)


def _recipe_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line of the recipe, and where its value came from."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    for line in text.splitlines():
        found = _ORIGIN.fullmatch(line)
        yield (found["text"], found["origin"]) if found else (line, "")


def _read_skipped(path: Path) -> Json:
    """The samples that were skipped: how many of each split, and the first of them."""
    try:
        with open_regular(path) as file:
            lines = file.read(_MAX_SKIPPED_BYTES).splitlines()
    except OSError:
        lines = []
    found = [each for each in map(parse_skipped, lines) if each is not None]
    counts = {split: sum(each == split for each, _ in found) for split in dict.fromkeys(split for split, _ in found)}
    return {"counts": counts, "samples": [{"split": split} | each._asdict() for split, each in found[:_MAX_SKIPPED]]}
