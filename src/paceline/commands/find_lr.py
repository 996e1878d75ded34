"""`paceline find-lr`: the learning-rate range test."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import add_json, add_recipe, print_json, progress_bar, read_recipe
from paceline.core.errors import TrainingError, UsageError
from paceline.core.text import pluralize

if TYPE_CHECKING:
    from paceline.data.loader import StepBatch
    from paceline.engine.run import Run

_MIN_STEPS = 20
_SMOOTHED = 0.1  # share of the steps that the average of the losses reaches back
_DIVERGED = 4.0  # times the best loss: nothing is learned beyond
_IGNORED = 0.1  # share of the steps whose losses are those of the first weights
_FALL = (0.8, 0.2)  # shares of the fall that are left where the line that is fitted to it begins and ends
_BELOW_LOWEST = 10.0  # at the lowest loss the learning rate is about to be too high


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument("--low", type=float, default=1e-6, help="lowest learning rate (default: 1e-6)")
    parser.add_argument("--high", type=float, default=10.0, help="highest learning rate (default: 10)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="number of steps (default: 100)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save the curve as a PNG file")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Run the range test, plot the loss and suggest a learning rate."""
    checked = read_recipe(options)
    if not 0 < options.low < options.high:
        raise UsageError(f"find-lr: expected --low above 0 and below --high, got {options.low:g} and {options.high:g}")
    if options.steps < _MIN_STEPS:
        raise UsageError(f"find-lr: expected --steps {_MIN_STEPS} or more, got {options.steps}")
    from paceline.recipe.build import Builder
    from paceline.visualize.charts import draw_curves, terminal_curve
    from paceline.visualize.image import save_png

    run = Builder(checked).run(Path("runs") / checked.recipe.name)
    _print_cost(run, options.steps)
    with progress_bar() as bar:
        task = bar.add_task("find-lr", total=options.steps)
        rates, losses = range_test(run, options.low, options.high, options.steps, lambda: bar.advance(task))
    smoothed = smooth(losses, options.steps)
    found = suggest(rates, losses, options.steps)
    if options.plot:
        title = f"{run.name}: range test, suggested learning rate {found:.2g}"
        curves = {"loss": (rates, smoothed)}
        save_png(draw_curves(curves, title, "learning rate", "loss, smoothed", log_x=True), options.plot)
    if options.json:
        print_json({"suggested": found, "lr": rates, "loss": smoothed})
        return 0
    print(f"loss, smoothed, while the learning rate grows from {rates[0]:.1g} to {rates[-1]:.2g}")
    print("\n".join(terminal_curve(smoothed)))
    print(f"suggested optimizer.lr: {found:.2g}" + _hint(checked.recipe))
    return 0


def _print_cost(run: Run, steps: int) -> None:
    samples = steps * run.batches.sampler.batch
    epochs = steps / run.progress.steps_per_epoch
    cost = f"at most {pluralize(steps, 'step')} on {pluralize(samples, 'sample')} ({epochs:.2g} epochs)"
    print(f"find-lr: {cost}; --steps sets the budget; nothing is saved", file=sys.stderr)


def range_test(
    run: Run, low: float, high: float, steps: int, advance: Callable[[], object] = lambda: None
) -> tuple[list[float], list[float]]:
    """Learning rates and losses, from `low` up to `high` or to where the loss diverges."""
    from paceline.engine.replay import check_finite
    from paceline.engine.step import train_step

    run.explain_nonfinite = _expected  # this is how a range test ends: nothing is kept of it
    run.progress.total_steps = steps
    growth = (high / low) ** (1 / max(1, steps - 1))
    run.scheduler.lr = lambda step: low * growth**step  # type: ignore[assignment]
    run.freezing.train_mode(run.model)
    rates: list[float] = []
    losses: list[float] = []
    for step_batch in run.batches:
        result = train_step(run, step_batch)
        try:
            check_finite(run, [result])
        except TrainingError:  # a gradient that is not finite
            break
        loss = result.losses["loss"].item()
        if not math.isfinite(loss):
            break
        rates.append(run.scheduler.lr(step_batch.step))
        losses.append(loss)
        advance()
        smoothed = smooth(losses, steps)
        if smoothed[-1] > _DIVERGED * min(smoothed):
            break
    if len(rates) < _MIN_STEPS // 2:
        raise TrainingError(f"find-lr: the loss diverged after {pluralize(len(rates), 'step')}; begin lower with --low")
    return rates, losses


def smooth(losses: Sequence[float], steps: int) -> list[float]:
    """The exponential moving average of the losses of a range test, without a bias to its start."""
    kept, average, smoothed = max(0.0, 1 - 1 / (_SMOOTHED * steps)), 0.0, []
    for number, loss in enumerate(losses, 1):
        average = kept * average + (1 - kept) * loss
        smoothed.append(average / (1 - kept**number))
    return smoothed


def suggest(rates: Sequence[float], losses: Sequence[float], steps: int) -> float:
    """The learning rate between the middle of the loss's fall and a tenth of that at its lowest point.

    Both are taken on the logarithm of the rate. The first tenth of the steps gives the loss to begin with, and nothing
    else; what comes behind the lowest point does not count. The middle of the fall is where a line that is fitted to it
    has come half way, so that the noise of single batches has no say.
    """
    first = math.ceil(_IGNORED * steps)
    smoothed = smooth(losses, steps)
    lowest = min(range(first, len(rates)), key=lambda i: smoothed[i])
    before, bottom = statistics.fmean(losses[:first]), smoothed[lowest]
    if before - bottom < 2 * statistics.stdev(losses[:first]):
        raise TrainingError(
            f"find-lr: the loss did not fall, from {before:.4g} to {bottom:.4g} at best; raise --high or --steps"
        )
    logs = [math.log(rate) for rate in rates]
    high, low = (bottom + share * (before - bottom) for share in _FALL)
    falling = [i for i in range(first, lowest + 1) if low <= smoothed[i] <= high] or [lowest]
    middle = _crossing([logs[i] for i in falling], [smoothed[i] for i in falling], (before + bottom) / 2)
    middle = min(max(middle, logs[first]), logs[lowest])
    return math.exp((middle + logs[lowest] - math.log(_BELOW_LOWEST)) / 2)


def _crossing(x: Sequence[float], y: Sequence[float], level: float) -> float:
    """Where the line through the points with the least squares has a level."""
    slope, intercept = statistics.linear_regression(x, y) if len(x) > 1 else (0.0, 0.0)
    return (level - intercept) / slope if slope else statistics.fmean(x)


def _expected(run: Run, step_batch: StepBatch) -> str:
    return "the learning rate is too high"


def _hint(recipe: Any) -> str:
    reference = recipe.optimizer.base_batch_size
    return f" at batch {recipe.data.batch_size}; base_batch_size is {reference}, so scale it back" if reference else ""
