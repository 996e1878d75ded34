"""How long training stands still for a checkpoint; the benchmark of saving, as a row."""

from __future__ import annotations

from benchmarks.saving import measure
from chaos.row import Row


def run(quick: bool) -> list[Row]:
    """100 MB of state, saved beside the training."""
    section = measure(quick)
    goal = section.goals[0]
    slower = next(row for row in section.rows if row[0].startswith("a step while"))
    measured = f"{goal.value}; steps meanwhile take {slower[2]} × as long"
    return [Row("time that training stands still for a checkpoint of 100 MB", goal.text, measured, goal.is_met)]
