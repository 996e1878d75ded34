"""`paceline predict`: what a trained model says about new images, as tables, maps and drawn images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.commands.common import progress_bar, use_modules
from paceline.core.errors import DataError, UsageError
from paceline.core.text import pluralize
from paceline.launch.launcher import launch_if_needed
from paceline.recipe.load import run_recipe


def main(options: argparse.Namespace) -> int:
    """Predict all inputs, and print where the predictions are."""
    use_modules(options.use)
    run_recipe(options.run)  # where there is none, that is known before torch is loaded
    out: Path = options.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: expected a folder, found a file")

    from paceline.recipe.build_predictor import build_predictor, check_run

    checked = check_run(options.run, flips=options.tta)
    train = checked.recipe.train
    code = launch_if_needed(options, train.device, train.devices, train.strategy.name)
    if code is not None:
        return code
    predictor = build_predictor(checked, options.run, options.checkpoint, options.average)
    with predictor.run.world.together(), progress_bar() as bar:
        world = predictor.run.world
        task = bar.add_task("predicted", total=None, visible=world.is_main)

        def progress(number: int, total: int) -> None:
            """Count the batches of the other processes too: each predicts as many."""
            bar.update(task, advance=number * world.size, total=total)

        found = predictor.predict_files(options.inputs, out, options.images, progress)
    if found.problem:
        raise UsageError(found.problem)
    if not found.num_samples:
        raise DataError(f"none of {pluralize(found.num_skipped, 'input')} can be read")
    if predictor.run.world.is_main:
        skipped = f", {found.num_skipped:,} skipped" if found.num_skipped else ""
        print(f"step {predictor.checkpoint.step}, {predictor.checkpoint.path}", file=sys.stderr)
        print(f"{pluralize(found.num_samples, 'input')} predicted{skipped}; see {out}")
    return 0
