"""`paceline results`: compare the metrics of runs, and write them to a table."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.commands.common import add_json, print_json
from paceline.core.errors import DataError, PacelineError
from paceline.core.text import doubled_loss, format_metric, join_first, pluralize

if TYPE_CHECKING:
    from paceline.loggers.results import Result

_MAX_KEYS = 6  # columns for keys; runs that differ in more have little in common
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="runs, or folders of them (default: runs)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="update the rows of a .csv or .xlsx file")
    parser.add_argument("--split", metavar="SPLIT", help="val, test, or test.NAME (default: all)")
    parser.add_argument("--best", action="store_true", help="metrics of the best checkpoint (default: the last one)")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Print the metrics of runs and update their rows in `--out`."""
    from paceline.loggers.results import check_suffix, write_results

    if options.out:
        check_suffix(options.out)
    rows = _read_all(options.runs, options.split, options.best)
    if not rows:
        which = f" on {options.split}" if options.split else ""
        what = "by its best checkpoint" if options.best else "yet"
        raise DataError(f"none of these runs has metrics{which} {what}")
    groups = _grouped(rows)
    if options.json:
        print_json(groups_json(groups))
    else:
        print_groups(groups)
        if not options.best:
            print("metrics of the last evaluation; --best: of the best checkpoint", file=sys.stderr)
    if options.out:
        write_results(options.out, [row.result for row in rows])
        if not options.json:
            print(f"{pluralize(len(rows), 'row')} up to date in {options.out}", file=sys.stderr)
    return 0


def read_groups(runs: Sequence[Path]) -> list[Group]:
    """The last metrics of these runs, those that can be compared together."""
    return _grouped(_read_all(runs, None, best=False))


def print_groups(groups: Sequence[Group]) -> None:
    """Print a table for each group."""
    for number, group in enumerate(groups):
        print("\n" * (number > 0) + group.title)
        group.print()


def groups_json(groups: Sequence[Group]) -> dict[str, Any]:
    """All runs, the best of each group first, and the means over repetitions."""
    return {
        "runs": [group.as_json(row) for group in groups for row in group.rows],
        "summaries": [each for group in groups for each in group.summaries()],
        "left_out": [
            {**group.about, "directory": row.result.labels(Path())["directory"], "reason": why}
            for group in groups
            for row, why in group.left_out
        ],
    }


def _read_all(runs: Sequence[Path], split: str | None, best: bool) -> list[Row]:
    from paceline.loggers.results import read_last_and_best
    from paceline.report.run_folders import data_of, find_runs, read_recipe, settings_of

    found: list[Row] = []
    for folder, is_named in find_runs(runs):
        try:
            about, tree = read_recipe(folder)
            last, bests = read_last_and_best(folder, about)
        except PacelineError as error:
            if is_named:
                raise
            print(f"skipped: {error}", file=sys.stderr)
            continue
        own = [each for each in (bests if best else last) if split in (None, *_names(each.split))]
        if not own:
            print(f"skipped: {folder}: it has no such metrics", file=sys.stderr)
        # The values that change training or what is measured.
        settings = {key: value for key, value in settings_of(tree) if not _NO_SETTINGS.fullmatch(key)}
        beside = {} if best else {each.split: each for each in bests}
        found += [Row(each, settings, data_of(tree, each.split), beside.get(each.split)) for each in own]
    return found


def _names(split: str) -> tuple[str, str]:
    """What `--split` may call a split: `test.NAME` is also `test`."""
    return split, split.partition(".")[0]


def _grouped(rows: Sequence[Row]) -> list[Group]:
    """Rows that can be compared: those of one task, split and data."""
    members = _group_by(rows, lambda row: (row.result.about.task, row.result.split, row.data))
    return [Group(each) for each in members]


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


class Group:
    """Rows that can be compared, the best first."""

    def __init__(self, rows: Sequence[Row]) -> None:
        from paceline.loggers.results import read_main_metric

        first = rows[0]
        self.about = {"task": first.result.about.task, "split": first.result.split, "data": first.data}
        self.title = f"{first.result.about.task}, {first.result.split}" + (f": {first.data}" if first.data else "")
        mains = [read_main_metric(row.result.folder) for row in rows]
        main, is_higher = next(filter(None, mains), ("", True))
        self.metrics = [name for name in first.result.metrics if all(name in row.result.metrics for row in rows)]
        self.metrics.sort(key=lambda name: name != main)
        self.rows = sorted(rows, key=lambda row: self._rank(row, is_higher))
        self.keys = self._different_keys()
        self.main = main
        self.repetitions, self.left_out = _find_repetitions(self.rows)
        has_best = main in self.metrics and all(row.best and main in row.best.metrics for row in rows)
        has_best = has_best and all(each == mains[0] for each in mains)
        self._best_column = [f"best {main}"] if has_best else []

    def _value(self, row: Row, column: str) -> float | None:
        """The last value of a metric, or the best one of the main metric."""
        best = row.best if column in self._best_column else None
        return best.metrics[self.main] if best else row.result.metrics[column]

    def _rank(self, row: Row, is_higher: bool) -> float:
        value = row.result.metrics[self.metrics[0]] if self.metrics else None
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if is_higher else value

    def _different_keys(self) -> list[str]:
        """The keys that not all runs have the same value of; those that all have come first."""
        keys = dict.fromkeys(key for row in self.rows for key in row.settings)
        columns: dict[tuple[str, ...], str] = {}  # a fold is the same in train and val: one column is enough
        for key in keys:
            cells = tuple(_cell(row, key) for row in self.rows)
            if len({*cells}) > 1:
                columns.setdefault((key.rpartition(".")[2], *cells), key)
        return sorted(columns.values(), key=lambda key: not all(key in row.settings for row in self.rows))

    def as_json(self, row: Row) -> dict[str, Any]:
        """A run with the keys in which it differs from others of the group."""
        differs = {key: row.settings.get(key) for key in self.keys}
        found = row.result.labels(Path()) | {"data": row.data, "differs": differs, "metrics": row.result.metrics}
        best = row.best and {"step": row.best.step, "epoch": row.best.epoch, "metrics": row.best.metrics}
        return found | ({"best": best} if best else {})

    def summaries(self) -> Iterator[dict[str, Any]]:
        """Mean and standard deviation over the repetitions of each recipe."""
        for members in self.repetitions:
            pairs = {name: _mean_and_deviation([row.result.metrics[name] for row in members]) for name in self.metrics}
            yield {
                **self.about,
                "differs": {key: members[0].settings.get(key) for key in self._own_keys(members)},
                "num_runs": len(members),
                "mean": {name: mean for name, (mean, _) in pairs.items()},
                "standard_deviation": {name: deviation for name, (_, deviation) in pairs.items()},
            }

    def _own_keys(self, members: Sequence[Row]) -> list[str]:
        return [key for key in self.keys if len({_cell(row, key) for row in members}) == 1]

    def print(self) -> None:
        """The table, as wide as the terminal, and what it leaves out."""
        from paceline.loggers.tables import class_tables, print_table
        from paceline.metrics.class_metrics import split_classes

        hidden = {doubled_loss({n: row.result.metrics[n] or math.nan for n in self.metrics}) for row in self.rows}
        names, by_class = split_classes([*self.metrics, *(name for row in self.rows for name in row.result.metrics)])
        metrics = [name for name in names if name in self.metrics and hidden != {name}]
        metrics[1:1] = self._best_column
        keys = self.keys[:_MAX_KEYS]
        labels = ["epoch"] if len({row.result.state for row in self.rows}) == 1 else ["state", "epoch"]
        is_ambiguous = len({row.result.about.name for row in self.rows}) < len(self.rows)
        rows = []
        for row in self.rows:
            name = str(row.result.folder) if is_ambiguous else row.result.about.name
            about = {"state": row.result.state, "epoch": f"{row.result.epoch:.4g}"}
            cells = [name, *(_cell(row, key) for key in keys), *(about[label] for label in labels)]
            rows.append([*cells, *(_number(self._value(row, metric)) for metric in metrics)])
        for members in self.repetitions:
            own = self._own_keys(members)
            shared = [_cell(members[0], key) if key in own else "" for key in keys]
            cells = [f"mean ± sd of {len(members)}", *shared, *[""] * len(labels)]
            values = ([self._value(row, metric) for row in members] for metric in metrics)
            rows.append([*cells, *(_plus_minus(*_mean_and_deviation(each)) for each in values)])
        print_table(["run", *_short(keys), *labels, *metrics], rows, num_words=1 + len(keys) + len(labels) - 1)
        if len(self.keys) > _MAX_KEYS:
            print(f"they differ in {join_first(self.keys[_MAX_KEYS:], 8)} too")
        for row, why in self.left_out:
            print(f"not in a mean: {row.result.folder} {why}")
        if others := [name for name in names if name not in self.metrics]:
            print(f"only some have {join_first(others, 8)}")
        # Behind the lines of the runs come the means.
        measured = {line[0]: row.result.metrics for line, row in zip(rows, self.rows, strict=False)}
        for table in class_tables(measured, by_class):
            print()
            print_table(*table, num_words=4)


def _short(keys: Sequence[str]) -> list[str]:
    """The last word of each key; the whole of it where two end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [key if ends.count(end) > 1 or end == "name" else end for key, end in zip(keys, ends, strict=True)]


def _cell(row: Row, key: str) -> str:
    """The value of a key as text; empty for a run that has no such key."""
    value = row.settings.get(key, "")
    return value if isinstance(value, str) else json.dumps(value)


def _mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation over runs; None if a value is not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return None, None
    return statistics.fmean(known), statistics.stdev(known)


def _number(value: float | None) -> str:
    if value is None:
        return "nan"
    return format_metric(value) if isinstance(value, int) or abs(value) < 1e4 else f"{value:.4g}"


def _plus_minus(mean: float | None, deviation: float | None) -> str:
    return "nan" if mean is None else f"{_number(mean)} ± {_number(deviation)}"


def _find_repetitions(rows: Sequence[Row]) -> tuple[list[list[Row]], list[tuple[Row, str]]]:
    """The runs to average: finished, of one recipe and length, each seed once; those left out, and why."""
    repetitions: list[list[Row]] = []
    left_out = []
    for similar in _group_by(rows, lambda row: row.recipe):
        finished = [row for row in similar if row.result.state == "finished"]
        kept = []
        for same in _group_by(finished, lambda row: json.dumps(row.settings, sort_keys=True)):
            last = max(same, key=lambda row: row.ended)
            why = f"repeats {last.result.folder}, which has the same seed and is newer"
            left_out += [(row, why) for row in same if row is not last]
            kept.append(last)
        means = [each for each in _group_by(kept, lambda row: row.length) if len(each) > 1]
        repetitions += means
        if means:
            averaged = [row for each in means for row in each]
            lengths = ", ".join(each[0].length for each in means)
            left_out += [(row, f"trains {row.length}, not {lengths}") for row in kept if row not in averaged]
            left_out += [(row, f"is {row.result.state}") for row in similar if row not in finished]
    return repetitions, left_out


def _group_by(items: Iterable[_Item], key: Callable[[_Item], object]) -> list[list[_Item]]:
    """The items with equal keys together, in their order."""
    groups: dict[object, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
