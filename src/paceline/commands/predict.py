"""`paceline predict`: what a trained model says about new images, as tables, maps and drawn images."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.common import add_processes, add_trained_run, print_notes, progress_bar
from paceline.core.atomic_write import replace_file
from paceline.core.errors import DataError, UsageError
from paceline.core.text import join_first, pluralize

if TYPE_CHECKING:
    from paceline.checkpoint.reader import Checkpoint

_ABOUT = "predict.json"
"""Says which checkpoint predicted, and marks a folder of predictions: only those are written again."""
_FOLDERS = {"masks": "png", "images": "jpg", "outputs": "npy"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_trained_run(parser)
    parser.add_argument(
        "inputs", type=Path, nargs="+", metavar="INPUT", help="images, videos, folders of them, or lists (.txt, .csv)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where predictions are written")
    parser.add_argument("--tta", action="store_true", help="average over each image and its mirror image")
    parser.add_argument("--no-images", dest="images", action="store_false", help="draw no images")
    parser.add_argument(
        "--score",
        type=float,
        metavar="X",
        help="least score of detections, written and drawn (default: all are written, the 20 best from 0.3 on drawn)",
    )
    add_processes(parser)


def main(options: argparse.Namespace) -> int:
    """Predict all inputs, and print where the predictions are."""
    from paceline.launch.launcher import launch_if_needed
    from paceline.recipe.load import run_recipe

    run_recipe(options.run)  # where there is none, that is known before torch is loaded
    out: Path = options.out
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: expected a folder, found a file")
    if options.score is not None and not 0 <= options.score <= 1:
        raise UsageError(f"--score {options.score:g}: expected a number from 0 to 1")

    from paceline.recipe.build_predictor import build_predictor, check_run

    checked = check_run(options.run, options.use, flips=options.tta, min_score=options.score)
    print_notes(checked.notes)
    _check_out(out)
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

        if world.is_main:
            _begin(out, options.run, predictor.checkpoint)
        found = predictor.predict_files(options.inputs, out, options.images, progress)
    if found.problem:
        raise UsageError(found.problem)
    if not found.num_samples:
        raise DataError(f"none of {pluralize(found.num_skipped, 'input')} can be read")
    if predictor.run.world.is_main:
        skipped = f", {found.num_skipped:,} skipped" if found.num_skipped else ""
        if found.note:
            print(f"warning: {found.note}", file=sys.stderr)
        print(f"step {predictor.checkpoint.step}, {predictor.checkpoint.path}", file=sys.stderr)
        print(f"{pluralize(found.num_samples, 'input')} predicted{skipped}; see {out}")
    return 0


def _check_out(out: Path) -> None:
    """Raise UsageError if the folder holds anything but an earlier prediction, which is replaced."""
    held = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if held and _ABOUT not in held:
        raise UsageError(
            f"--out {out} is not empty, and no earlier prediction: it holds {join_first(held, 5)}; choose a new or"
            " empty folder, since files of the same names would be replaced"
        )


def _begin(out: Path, run: Path, checkpoint: Checkpoint) -> None:
    """Remove an earlier prediction, and write which checkpoint predicts now."""
    about = {"run": str(run), "checkpoint": str(checkpoint.path), "step": checkpoint.step}
    try:
        out.mkdir(parents=True, exist_ok=True)
        own = {out / name: suffix for name, suffix in _FOLDERS.items() if not (out / name).is_symlink()}
        files = (path for folder, suffix in own.items() for path in folder.rglob(f"*.{suffix}"))
        for path in [*out.glob("predictions.*"), *files]:
            path.unlink()
        for folder in own:
            with suppress(OSError):  # not there, or not empty
                folder.rmdir()
        replace_file(out / _ABOUT, f"{json.dumps(about, indent=2)}\n".encode())
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror or error}") from error
