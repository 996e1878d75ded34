"""`paceline find-lr`: the learning-rate range test."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import print_json, read_recipe
from paceline.core.errors import TrainingError, UsageError
from paceline.core.text import pluralize

if TYPE_CHECKING:
    from paceline.data.loader import StepBatch
    from paceline.engine.run import Run

_SMOOTHING = 0.9
_HOPELESS = 4.0  # times the best loss: nothing is learned beyond


def main(options: argparse.Namespace) -> int:
    """Run the range test, plot the loss and suggest a learning rate."""
    checked = read_recipe(options)
    if not options.low < options.high:
        raise UsageError(f"find-lr: expected --low less than --high, got {options.low:g} and {options.high:g}")
    from paceline.recipe.build import Builder
    from paceline.visualize.curves import draw_curves, terminal_curve
    from paceline.visualize.image import save_png

    run = Builder(checked).run(Path("runs") / checked.recipe.name)
    rates, losses = range_test(run, options.low, options.high, options.steps)
    found = suggest(rates, losses)
    if options.plot:
        title = f"{run.name}: range test, suggested learning rate {found:.2g}"
        curves = {"loss": (rates, losses)}
        save_png(draw_curves(curves, title, "learning rate", "loss, smoothed", log_x=True), options.plot)
    if options.json:
        print_json({"suggested": found, "lr": rates, "loss": losses})
        return 0
    print(f"loss, smoothed, while the learning rate grows from {rates[0]:.1g} to {rates[-1]:.2g}")
    print("\n".join(terminal_curve(losses)))
    print(f"suggested optimizer.lr: {found:.2g}" + _hint(checked.recipe))
    return 0


def range_test(run: Run, low: float, high: float, steps: int) -> tuple[list[float], list[float]]:
    """Learning rates and smoothed losses, from `low` to `high` or until the loss diverges."""
    from paceline.engine.step import train_step

    run.explain_nonfinite = _expected  # this is how a range test ends: nothing is kept of it
    run.progress.total_steps = steps
    growth = (high / low) ** (1 / max(1, steps - 1))
    run.scheduler.lr = lambda step: low * growth**step  # type: ignore[assignment]
    run.freezing.train_mode(run.model)
    rates: list[float] = []
    losses: list[float] = []
    average = 0.0
    for step_batch in run.batches:
        try:
            loss = train_step(run, step_batch).losses["loss"].item()
        except TrainingError:
            break
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        rates.append(run.scheduler.lr(step_batch.step))
        losses.append(average / (1 - _SMOOTHING ** (len(rates))))
        _show(step_batch.step + 1, steps, rates[-1], losses[-1])
        if not math.isfinite(loss) or losses[-1] > _HOPELESS * min(losses):
            break
    if len(rates) < 10:
        raise TrainingError(f"find-lr: the loss diverged after {pluralize(len(rates), 'step')}; start lower with --low")
    return rates, losses


def suggest(rates: list[float], losses: list[float]) -> float:
    """The learning rate at which the loss falls fastest before its minimum."""
    lowest = losses.index(min(losses))
    slopes = [
        (losses[i + 1] - losses[i - 1]) / (math.log(rates[i + 1]) - math.log(rates[i - 1]))
        for i in range(1, max(2, lowest))
    ]
    return rates[1 + slopes.index(min(slopes))]


def _expected(run: Run, step_batch: StepBatch) -> str:
    return "the learning rate is too high"


def _show(step: int, steps: int, rate: float, loss: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{step}/{steps}  lr {rate:.2e}  loss {loss:.4f}", end="" if step < steps else "\n", file=sys.stderr)


def _hint(recipe: Any) -> str:
    reference = recipe.optimizer.base_batch_size
    return f" at batch {recipe.data.batch_size}; base_batch_size is {reference}, so scale it back" if reference else ""
