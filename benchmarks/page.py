"""Results of all benchmarks: kept in docs/benchmarks.json, from which the page and its plot are made."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.plot import draw_overview
from benchmarks.report import Goal, Ratio, Section, sentence, verdict
from scripts.docs_site import slug

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_PACKAGES = (
    *("paceline", "torch", "torchvision", "numpy", "av", "nvidia-dali-cuda130", "lightning", "accelerate"),
    *("transformers", "pytorch-ignite", "mmengine-lite"),
)


@dataclass(frozen=True)
class Result:
    """A section with the circumstances of its measurement."""

    section: Section
    date: str
    commit: str
    minutes: float
    load: float

    def circumstances(self) -> str:
        """When and on which code it was measured, and how busy the machine was."""
        code = f"at commit {self.commit}" if self.commit else "on older code, of which no commit was noted"
        took = f", in {self.minutes:.1f} minutes" if self.minutes else ""
        return f"Measured on {self.date} {code}{took}; load average {self.load:.1f} over the 15 minutes before its end."


@dataclass(frozen=True)
class Results:
    """The newest result of each benchmark by its name, in the page's order, and the machine."""

    machine: str
    by_name: dict[str, Result]


def save(name: str, section: Section, seconds: float, names: Sequence[str], docs: Path = DOCS) -> None:
    """Put a new result in place of the older one and write the page and the plot again; `names` is the page's order."""
    path = docs / "benchmarks.json"
    older = read(path).by_name if path.exists() else {}
    new = Result(section, time.strftime("%Y-%m-%d"), commit(), seconds / 60, os.getloadavg()[2])
    found = {**older, name: new}
    results = Results(machine(), {each: found[each] for each in names if each in found})
    path.write_text(json.dumps(asdict(results), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    write_page(docs)


def write_page(docs: Path = DOCS) -> None:
    """Make the page and the plot of the stored results."""
    results = read(docs / "benchmarks.json")
    (docs / "images").mkdir(exist_ok=True)
    draw_overview({name: each.section for name, each in results.by_name.items()}, docs / "images" / "benchmarks.png")
    (docs / "benchmarks.md").write_text(page(results), encoding="utf-8")


def read(path: Path) -> Results:
    """The stored results."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return Results(stored["machine"], {name: _result(each) for name, each in stored["by_name"].items()})


def _result(stored: Mapping[str, Any]) -> Result:
    section = dict(stored["section"])
    goals = [
        Goal(**{**each, "ratio": Ratio(**each["ratio"]) if each["ratio"] else None}) for each in section.pop("goals")
    ]
    return Result(**{**stored, "section": Section(**section, goals=goals)})


def page(results: Results) -> str:
    """The page in Markdown."""
    parts = [
        "# Benchmarks",
        "`make bench` measures everything and writes this page; `python -m benchmarks NAME` measures one section again"
        " (" + ", ".join(f"`{name}`" for name in results.by_name) + ").",
        f"The machine: {results.machine}",
        "Contestants take short turns within one run. A ratio is the median over rounds of"
        " (cost of the contestant / cost of the reference in the same round); the *middle half* is its spread.",
        "## Overview",
        _overview(results),
        "![Measured ratios and their goals; a step in each framework](images/benchmarks.png)",
        "[Reliability](reliability.md) has what faults cost, and [batch size](batch-size.md) what scaling the learning"
        " rate brings. Neither is part of `make bench`.",
    ]
    parts += [_written(each) for each in results.by_name.values()]
    return "\n\n".join(parts) + "\n"


def _overview(results: Results) -> str:
    rows = [["what", "measured", "goal", "", "section", "measured on", "commit"], ["---", *["---:"] * 2, *["---"] * 4]]
    for each in results.by_name.values():
        title = each.section.title
        origin = [f"[{title}](#{slug(title)})", each.date, each.commit or "older"]
        rows += [[goal.text, goal.value, goal.bound, verdict(goal), *origin] for goal in each.section.goals]
    return _table(rows)


def _written(result: Result) -> str:
    section = result.section
    rule = ["---", *["---:"] * (len(section.header) - 1)]
    table = _table([section.header, rule, *section.rows])
    parts = [f"## {section.title}", result.circumstances(), section.method, table]
    if section.goals:
        parts.append("\n".join(f"- {sentence(goal)}" for goal in section.goals))
    return "\n\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def machine() -> str:
    """The processor, its cores, and the versions of what is installed."""
    versions = ", ".join(f"{name} {version}" for name, version in installed().items() if version)
    cores = len(os.sched_getaffinity(0))
    return f"{_processor()}, {cores} cores; {platform.system()}, Python {platform.python_version()}, {versions}."


def installed() -> dict[str, str | None]:
    """The version of each package that takes part, None if it is not there."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit that is measured, with a word if the code differs from it; empty outside of a clone."""
    number = _git("rev-parse", "--short", "HEAD")
    changes = _git("status", "--porcelain", "--", "src", "benchmarks")
    return f"{number} with changes" if number and changes else number


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
