"""The page: values of runs, style and script in one HTML file that loads nothing, also written while a run trains."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from time import monotonic
from typing import Any

from paceline import __version__
from paceline.core.atomic_write import replace_file
from paceline.loggers.events import Ended, Event, Logger, Started
from paceline.report.history import Json
from paceline.report.run_folders import read_recipe, settings_of
from paceline.report.run_reader import read_run

_MOST_TIME = 0.01  # the share of the run that writing reports may take
_MAX_IMAGE_BYTES = 4_000_000  # of the images of all runs together
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_SCRIPTS = ("elements.js", "chart.js", "curves.js", "tables.js", "images.js", "verdict.js", "page.js")


def render_report(folders: Sequence[Path]) -> bytes:
    """The page on one run, or on several that are compared, as of now."""
    per_run = _MAX_IMAGE_BYTES // max(1, len(folders))
    runs = [read_run(folder, per_run) for folder in folders]
    data = {
        "version": __version__,
        "written": time.time(),
        "runs": runs,
        "differences": different_keys(folders),
    }
    return _page(data, " · ".join(dict.fromkeys(run["name"] for run in runs)))


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Write the report of one or several run directories into an HTML file, atomically."""
    content = render_report(folders)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, content, is_durable=False)


class ReportFile(Logger):
    """Writes `report.html` at the start and the end of a run, and in between as often as its share of the time allows.

    It reads what the other sinks wrote, so it comes after them. A report that cannot be written is one warning.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._has_warned = False
        self._next_write = 0.0

    def handle(self, event: Event) -> None:
        """Write the report if one is due."""
        started, problem = monotonic(), None
        if started < self._next_write and not isinstance(event, Started | Ended):
            return
        try:
            replace_file(self._folder / "report.html", render_report([self._folder]), is_durable=False)
        except Exception as error:  # noqa: BLE001 - no report is worth a run
            problem = f"{type(error).__name__}: {error}"
        self._next_write = monotonic() + (monotonic() - started) / _MOST_TIME
        if problem is not None and not self._has_warned:
            self._has_warned = True
            hint = f"training continues; write it later with: paceline report {self._folder}"
            self._warn(f"cannot write {self._folder / 'report.html'}: {problem}; {hint}")


def different_keys(folders: Sequence[Path]) -> list[Json]:
    """The recipe keys in which runs differ, with the value of each run as text; None where it has no such key."""
    settings = [dict(settings_of(read_recipe(folder)[1])) for folder in folders]
    found = []
    for key in dict.fromkeys(key for own in settings for key in own):
        values = [_text(own[key]) if key in own else None for own in settings]
        if key != "name" and len(set(values)) > 1:
            found.append({"key": key, "values": values})
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _page(data: Json, title: str) -> bytes:
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in _SCRIPTS)
    parts = {
        # Only this very style and script may run, whatever a name or a recipe holds.
        "policy": f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": _embedded(data),
    }
    page = _PLACEHOLDER.sub(lambda found: parts[found[1]], _asset("page.html"))
    return page.encode(errors="backslashreplace")


def _asset(name: str) -> str:
    return files("paceline.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: Json) -> str:
    """JSON that ends no script element and opens no comment, whatever text is in it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
