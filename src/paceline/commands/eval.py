"""`paceline eval`: the metrics of a checkpoint, the same on any number of processes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from paceline.checkpoint.best import target_of
from paceline.commands.common import print_json, use_modules
from paceline.core.errors import CheckpointError, PacelineError, UsageError
from paceline.core.text import format_metric, pluralize
from paceline.launch.start import share_out
from paceline.recipe.load import load
from paceline.recipe.schema import Recipe
from paceline.recipe.validate import validate

_WITHOUT_EFFECT = ("observe.", "evaluate.save_predictions=", "evaluate.num_workers=")
"""Keys that change no metric."""


def main(options: argparse.Namespace) -> int:
    """Measure, and print the metrics."""
    use_modules(options.use)
    place = Path(options.recipe)
    is_run = place.is_dir()
    if is_run and not (place / "recipe.yaml").is_file():
        raise UsageError(f"{place} is not a run directory: it has no recipe.yaml")
    checked = validate(load(str(place / "recipe.yaml") if is_run else options.recipe, options.overrides))
    run_folder = place if is_run else Path("runs") / checked.recipe.name
    _find_checkpoint(options.checkpoint, run_folder)  # where there is none, that is known before torch is loaded
    split = options.split or ("test" if checked.recipe.data.test else "val")
    if getattr(checked.recipe.data, split) is None:
        raise UsageError(f"{checked.locate('data')}: there is no data.{split} to measure on")

    code = share_out(options, checked.recipe.train.device, checked.recipe.train.devices)
    if code is not None:
        return code

    from paceline.checkpoint.store import open_checkpoint
    from paceline.commands.resume import data_differences
    from paceline.core.agreement import read_together
    from paceline.data.fingerprint import fingerprint
    from paceline.engine.evaluate import evaluate_with_average
    from paceline.engine.predictions import predictions_place
    from paceline.engine.saved_state import check_state
    from paceline.recipe.build import Builder

    builder = Builder(checked, trains=False)
    with builder.world.together():
        checkpoint = read_together(
            builder.world, lambda: open_checkpoint(_find_checkpoint(options.checkpoint, run_folder)), open_checkpoint
        )
        assert checkpoint is not None
        check_state(checkpoint)
        run = builder.run(run_folder)
        run.visualize = False  # metrics are printed, and no image is written
        run.load_model(checkpoint)
        run.load_average(checkpoint)
        evaluation = evaluate_with_average(run, split)
    if run.world.is_main:
        answer = {
            "checkpoint": str(checkpoint.path),
            "step": checkpoint.step,
            "split": split,
            "num_samples": evaluation.num_samples,
            "num_skipped": evaluation.num_skipped,
            "metrics": evaluation.metrics,
        }
        now = {split: fingerprint(run.evaluations[split].source.dataset).to_json()}
        for difference in data_differences(checkpoint, now):
            print(f"warning: not the data that the run was measured on: {difference}", file=sys.stderr)
        _print(answer, options.json)
        if run.save_predictions and not evaluation.problem:
            print(f"predictions are in {predictions_place(run, split)}", file=sys.stderr)
        if checked.recipe.logging.results:
            epoch = checkpoint.step / run.progress.steps_per_epoch
            _keep(checked.recipe, _run_of(checkpoint.path, run_folder), answer, epoch, options.overrides)
        if evaluation.problem:
            raise UsageError(evaluation.problem)
    return 0


def _find_checkpoint(named: Path | None, run_folder: Path) -> Path:
    """What is to be measured: the named checkpoint, else the run's best, else its newest."""
    if named is not None:
        return named
    best = run_folder / "best"
    if target_of(best) is not None:
        return best
    if not (run_folder / "checkpoints").is_dir():
        raise CheckpointError(f"{run_folder} holds no checkpoint: train first, or name one with --checkpoint")
    return run_folder


def _run_of(checkpoint: Path, otherwise: Path) -> Path:
    """The run directory that a checkpoint lies in."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else otherwise


def _keep(recipe: Recipe, folder: Path, answer: dict[str, Any], epoch: float, overrides: list[str]) -> None:
    """Bring the run's row in the table of results up to date; the metrics are printed, whatever becomes of it."""
    from paceline.loggers.results import About, Result, read_state, write_results

    about = About(recipe.name, recipe.task.name, recipe.model.name)
    numbers = (answer["step"], epoch, answer["num_samples"], answer["num_skipped"])
    settings = " ".join(each for each in overrides if not each.startswith(_WITHOUT_EFFECT))
    result = Result(about, folder, answer["split"], read_state(folder), *numbers, answer["metrics"], settings)
    try:
        write_results(Path(recipe.logging.results or "").expanduser(), [result])
    except PacelineError as error:
        print(f"warning: {error}", file=sys.stderr)


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    skipped = f" ({answer['num_skipped']:,} skipped)" if answer["num_skipped"] else ""
    samples = pluralize(answer["num_samples"], "sample")
    print(f"{answer['split']}, {samples}{skipped}, step {answer['step']}, {answer['checkpoint']}", file=sys.stderr)
    metrics = answer["metrics"]
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"{name:<{width}}  {format_metric(value)}")
