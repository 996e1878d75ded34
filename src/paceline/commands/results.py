"""`paceline results`: what several runs reached, side by side, and in a table that people keep."""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.commands.common import print_json
from paceline.commands.run_lock import check_free
from paceline.core.errors import DataError, PacelineError, UsageError
from paceline.core.text import format_metric, pluralize
from paceline.loggers.results import About, Result, read_results, write_results
from paceline.loggers.results_table import check_suffix

_DEEPEST = 4
_MOVED_ASIDE = re.compile(r".*~\d+")
_RUN_COLUMNS = ("run", "directory", "model", "state", "step", "epoch")


def main(options: argparse.Namespace) -> int:
    """Print the metrics of runs, and bring their rows in `--out` up to date."""
    if options.out:
        check_suffix(options.out)
    results = _read_all(options)
    if not results:
        which = f" on {options.split}" if options.split else ""
        what = "by its best checkpoint" if options.best else "yet"
        raise DataError(f"none of these runs has measured anything{which} {what}")
    groups = _grouped(results)
    if options.json:
        print_json({"runs": [_as_json(each) for each in results], "summaries": list(_summaries(groups))})
    else:
        for number, ((task, split), members) in enumerate(groups.items()):
            print("\n" * (number > 0) + f"{task}, {split}")
            _print_group(members)
    if options.out:
        write_results(options.out, results)
        if not options.json:
            print(f"{pluralize(len(results), 'row')} up to date in {options.out}", file=sys.stderr)
    return 0


def _read_all(options: argparse.Namespace) -> list[Result]:
    found: list[Result] = []
    for folder, is_named in _folders(options.runs):
        try:
            own = read_results(folder, _about(folder), options.best)
        except PacelineError as error:
            if is_named:
                raise
            print(f"left out: {error}", file=sys.stderr)
            continue
        own = [_as_it_is(each) for each in own if options.split in (None, each.split, each.split.partition(".")[0])]
        if not own:
            print(f"left out: {folder}: there are no such metrics in it", file=sys.stderr)
        found += own
    return found


def _as_it_is(result: Result) -> Result:
    """With "killed" for a run that was never finished and that no process works on any more."""
    if result.state != "running":
        return result
    try:
        check_free(result.folder)
    except UsageError:
        return result
    return replace(result, state="killed")


def _folders(named: list[Path]) -> list[tuple[Path, bool]]:
    """The run directories that are meant, each once, and whether it was named itself."""
    found: dict[str, tuple[Path, bool]] = {}
    for place in named or [Path("runs")]:
        if not place.is_dir():
            hint = "" if named else ": train something first, or name a run directory"
            raise UsageError(f"{place} is not a folder{hint}")
        inner = [place] if _is_run(place) else list(_inside(place, 1))
        if not inner:
            raise UsageError(f"{place} is not a run directory, and holds none")
        for folder in inner:
            found.setdefault(os.path.realpath(folder), (folder, folder == place))
    return list(found.values())


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() and any((folder / n).is_file() for n in ("status.json", "metrics.jsonl"))


def _inside(folder: Path, depth: int) -> Iterator[Path]:
    """The runs in a folder, by name, without those that a new start has moved aside."""
    try:
        inner = sorted((each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()), key=_by_numbers)
    except OSError:
        return
    for each in inner:
        if each.name.startswith(".") or _MOVED_ASIDE.fullmatch(each.name):
            continue
        if _is_run(each):
            yield each
        elif depth < _DEEPEST:
            yield from _inside(each, depth + 1)


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """So that fold-10 comes behind fold-9."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"([0-9]+)", path.name)]


def _about(folder: Path) -> About:
    from paceline.recipe.document import read_document

    path = folder / "recipe.yaml"
    tree = read_document(path, str(path)).tree
    words = [_named(tree.get(key)) if isinstance(tree, dict) else None for key in About._fields]
    if None in words:
        raise DataError(f"{path}: is not the recipe of a run: expected name, task and model")
    return About(*(str(word) for word in words))


def _named(part: Any) -> str | None:
    name = part.get("name") if isinstance(part, dict) else part
    return name if isinstance(name, str) else None


Groups = dict[tuple[str, str], list[Result]]
"""Results that can be compared: those of one task and split."""


def _grouped(results: Sequence[Result]) -> Groups:
    groups: Groups = {}
    for each in results:
        groups.setdefault((each.about.task, each.split), []).append(each)
    return groups


def _finished(members: Sequence[Result]) -> list[Result]:
    return [each for each in members if each.state == "finished"]


def _shared(members: Sequence[Result]) -> list[str]:
    return [name for name in members[0].metrics if all(name in each.metrics for each in members)]


def _mean_and_deviation(members: Sequence[Result], name: str) -> tuple[float | None, float | None]:
    """Over runs, with n - 1 below; None where some run's metric is not finite."""
    values = [each.metrics[name] for each in members]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return None, None
    return statistics.fmean(known), statistics.stdev(known)


def _as_json(result: Result) -> dict[str, Any]:
    return result.labels(Path()) | {"metrics": result.metrics}


def _summaries(groups: Groups) -> Iterator[dict[str, Any]]:
    for (task, split), members in groups.items():
        finished = _finished(members)
        if len(finished) > 1:
            pairs = {name: _mean_and_deviation(finished, name) for name in _shared(finished)}
            yield {
                "task": task,
                "split": split,
                "num_runs": len(finished),
                "mean": {name: mean for name, (mean, _) in pairs.items()},
                "standard_deviation": {name: deviation for name, (_, deviation) in pairs.items()},
            }


def _print_group(members: list[Result]) -> None:
    names = _shared(members)
    heads = [column for column in _RUN_COLUMNS if column != "directory" or _are_ambiguous(members)]
    rows = [[*_run_cells(each, heads), *(_number(each.metrics[name]) for name in names)] for each in members]
    finished = _finished(members)
    if len(finished) > 1:
        cells = [f"mean ± sd of {len(finished)}", *[""] * (len(heads) - 1)]
        rows.append([*cells, *(_plus_minus(*_mean_and_deviation(finished, name)) for name in names)])
    _print_columns([*heads, *names], rows, len(heads))
    shared = set(names)
    others = dict.fromkeys(name for each in members for name in each.metrics if name not in shared)
    if others:
        print(f"only some have {', '.join(others)}")


def _are_ambiguous(members: Sequence[Result]) -> bool:
    return len({each.about.name for each in members}) < len(members)


def _run_cells(result: Result, heads: Sequence[str]) -> list[str]:
    cells = {
        "run": result.about.name,
        "directory": str(result.folder),
        "model": result.about.model,
        "state": result.state,
        "step": str(result.step),
        "epoch": f"{result.epoch:.4g}",
    }
    return [cells[head] for head in heads]


def _number(value: float | None) -> str:
    if value is None:
        return "nan"
    return format_metric(value) if isinstance(value, int) or abs(value) < 1e4 else f"{value:.4g}"


def _plus_minus(mean: float | None, deviation: float | None) -> str:
    return "nan" if mean is None else f"{_number(mean)} ± {_number(deviation)}"


def _print_columns(header: list[str], rows: list[list[str]], num_heads: int) -> None:
    """A table; on a terminal that is too narrow for it the metrics go on below, beside the names of the runs."""
    from rich.console import Console
    from rich.table import Table

    widths = [max(len(row[column]) for row in [header, *rows]) + 2 for column in range(len(header))]
    console = Console(highlight=False)
    room = console.width if console.is_terminal else sum(widths)
    first, metrics = list(range(num_heads)), list(range(num_heads, len(header)))
    while first:
        format_metric, used = [*first], sum(widths[column] for column in first)
        for column in metrics:
            used += widths[column]
            if used > room and len(format_metric) > 1:
                break
            format_metric.append(column)
        metrics = metrics[len(format_metric) - len(first) :]
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in format_metric:
            is_word = column < min(num_heads, header.index("step"))
            table.add_column(header[column], justify="left" if is_word else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[column] for column in format_metric))
        Console(width=max(room, sum(widths[c] for c in format_metric)), highlight=False, markup=False).print(table)
        first = [0] if metrics else []
