"""Tables on the console: as wide as the terminal, metrics of many classes summed up."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from paceline.core.text import doubled_loss, format_metric
from paceline.metrics.class_metrics import HEADER, split_classes, summarize


def terminal_width(stream: TextIO) -> int | None:
    """The width of the terminal behind a stream, or COLUMNS; None if neither is known."""
    asked = os.environ.get("COLUMNS", "")
    return shutil.get_terminal_size().columns if stream.isatty() or asked.isdecimal() else None


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_words: int = 1, width: int | None = None
) -> list[str]:
    """Format rows under a header; columns beyond `width` continue in another table below.

    The first column is repeated there.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines: list[str] = []
    left = list(range(1, len(header)))
    while left or not lines:
        columns, used = [0], widths[0]
        while left and (used + 2 + widths[left[0]] <= (width or sys.maxsize) or len(columns) == 1):
            used += 2 + widths[left[0]]
            columns.append(left.pop(0))
        lines += [""] * bool(lines)
        for row in [header, *rows]:
            cells = [f"{row[i]:<{widths[i]}}" if i < num_words else f"{row[i]:>{widths[i]}}" for i in columns]
            lines.append("  ".join(cells).rstrip())
    return lines


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_words: int = 1) -> None:
    """Print `table_lines`, as wide as the terminal."""
    print("\n".join(table_lines(header, rows, num_words, terminal_width(sys.stdout))))


Table = tuple[list[str], list[list[str]]]
"""The header and the rows."""


def metrics_tables(splits: Mapping[str, Mapping[str, float]], main_metric: str | None = None) -> list[Table]:
    """A row for each split, a column for each metric, the main one first; metrics of many classes in further tables."""
    doubled = {doubled_loss(metrics) for metrics in splits.values()}
    hidden = doubled if len(doubled) == 1 else set()
    names, by_class = split_classes(n for metrics in splits.values() for n in metrics if n not in hidden)
    names.sort(key=lambda name: name != main_metric)
    rows = [
        [split.removeprefix("test."), *(format_metric(metrics[name]) if name in metrics else "" for name in names)]
        for split, metrics in splits.items()
    ]
    named = {split.removeprefix("test."): metrics for split, metrics in splits.items()}
    return [(["", *names], rows), *class_tables(named, by_class)]


def class_tables(rows: Mapping[str, Mapping[str, float | None]], by_class: Sequence[str]) -> list[Table]:
    """For each of these metrics a table over its classes, with the rows that have them."""
    tables = []
    for metric in by_class:
        found = {name: summarize(metrics, metric) for name, metrics in rows.items()}
        tables.append(([f"{metric}.*", *HEADER], [[name, *cells] for name, cells in found.items() if cells[0]]))
    return tables
