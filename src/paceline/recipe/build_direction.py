"""Which direction of a metric's value is better, as the metric itself says; asked before anything is trained."""

from __future__ import annotations

from typing import Literal

from paceline.core.errors import RecipeError
from paceline.metrics.metric import declared_values, is_higher_better
from paceline.recipe.build_context import BuildContext
from paceline.recipe.problems import unknown_name
from paceline.tasks.task import Task


def best_direction(workshop: BuildContext, task: Task) -> tuple[str | None, Literal["max", "min"]]:
    """The value by which the best checkpoint is kept, and whether its greatest or its least is best."""
    recipe = workshop.recipe
    chosen, direction = recipe.checkpoint.best, recipe.checkpoint.direction
    best = task.main_metric if chosen == "auto" else chosen
    if direction != "auto":
        return best, direction
    if best is None or not (recipe.data.val or recipe.data.test):
        return best, "max"
    return best, "max" if _ask(workshop, "checkpoint.best", best, task, must_exist=chosen != "auto") else "min"


def check_expected(workshop: BuildContext, task: Task) -> None:
    """Refuse to expect what no metric reports, or what none says the direction of."""
    for name in workshop.recipe.expect:
        _ask(workshop, f"expect.{name}", name.removeprefix(f"{_set_name(workshop, name)}."), task)


def _set_name(workshop: BuildContext, name: str) -> str:
    """The test set of an expectation such as ecssd.mae; empty if it is for all."""
    set_name = name.partition(".")[0]
    return set_name if f"test.{set_name}" in workshop.recipe.data.splits() else ""


def _ask(workshop: BuildContext, key: str, name: str, task: Task, must_exist: bool = True) -> bool:
    try:
        found = is_higher_better(name, task.metrics())
    except ValueError as error:
        raise RecipeError(f"{workshop.checked.locate(key)}: {error}") from error
    if found is None and must_exist:
        unknown = unknown_name("metric", name, declared_values(task.metrics()))
        raise RecipeError(f"{workshop.checked.locate(key)}: {unknown}")
    return found is not False
