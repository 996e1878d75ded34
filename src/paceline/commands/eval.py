"""`paceline eval`: evaluate a checkpoint or a weights file, bit-identical on any number of processes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import (
    add_json,
    add_processes,
    add_recipe,
    print_json,
    print_notes,
    recipe_file,
    run_directory,
)
from paceline.core.errors import CheckpointError, PacelineError, UsageError
from paceline.core.text import format_metric, join_first, pluralize

if TYPE_CHECKING:
    from paceline.checkpoint.reader import Checkpoint
    from paceline.engine.evaluate import Evaluation
    from paceline.engine.run import Run
    from paceline.recipe.build import Builder
    from paceline.recipe.schema import Recipe
    from paceline.recipe.validate import CheckedRecipe

_WITHOUT_EFFECT = ("logging.", "evaluate.save_predictions=", "evaluate.num_workers=")
"""Overrides that do not change metrics."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a checkpoint or a weights file (default: model.weights=… of this command, else the run's best checkpoint,"
        " else its newest, else the recipe's model.weights)",
    )
    parser.add_argument(
        "--split", metavar="SPLIT", help="val, test, or test.NAME (default: test if the recipe has it, else val)"
    )
    add_json(parser)
    add_processes(parser)


def main(options: argparse.Namespace) -> int:
    """Evaluate, and print the metrics."""
    from paceline.checkpoint.best import find_checkpoint
    from paceline.launch.launcher import launch_if_needed
    from paceline.recipe.load import load
    from paceline.recipe.user_modules import read_checked
    from paceline.recipe.validate import validate

    reference, own_run = recipe_file(options.recipe), run_directory(options.recipe)
    weights = _named_weights(options.checkpoint)
    overrides = ["model.weights=null", *options.overrides, *weights] if weights else options.overrides
    checked = read_checked(reference, overrides, options.use, is_run=own_run is not None)
    print_notes(checked.notes)
    run_folder = own_run or Path("runs") / checked.recipe.name
    has_run = (run_folder / "checkpoints").is_dir() and not _names_weights(options.overrides)
    if not weights and options.checkpoint is None and not has_run:
        weights = _own_weights(checked)
        checked = validate(load(reference, [*overrides, *weights]))
    if not weights:
        find_checkpoint(run_folder, options.checkpoint)  # where there is none, that is known before torch is loaded
    splits = _splits(options.split, checked)

    train = checked.recipe.train
    code = launch_if_needed(options, train.device, train.devices, train.strategy.name)
    if code is not None:
        return code

    from paceline.engine.evaluate import evaluate_with_average
    from paceline.loggers.console import Console
    from paceline.loggers.events import LoggerGroup
    from paceline.recipe.build import Builder
    from paceline.recipe.build_context import open_together

    builder = Builder(checked, trains=False)
    with builder.world.together():
        checkpoint = None if weights else open_together(builder.world, run_folder, options.checkpoint)
        run = builder.run(run_folder)
        run.visualize = False  # metrics are printed, and no image is written
        if checkpoint:
            run.state.load_model(checkpoint)
            run.state.load_average(checkpoint)
        else:
            _refuse_random(builder, run)
        if run.world.is_main:
            run.logger = LoggerGroup([Console()])
        evaluations = {split: evaluate_with_average(run, split) for split in splits}
        run.logger.close()
    if run.world.is_main:
        _report(run, builder, checkpoint, evaluations, options)
    return 0


def _named_weights(named: Path | None) -> list[str]:
    """The override that loads `--checkpoint` as a weights file; none for our own checkpoints."""
    from paceline.checkpoint.best import read_pointer

    if named is None or not named.is_file() or read_pointer(named) is not None:
        return []
    return [f"model.weights={json.dumps({'file': str(named.absolute()), 'head': 'keep'})}"]


def _names_weights(overrides: list[str]) -> bool:
    """Whether the command line names weights by `model.weights`: these are evaluated then, whatever the run has."""
    return any(re.match(r"model\.weights(\.file)?=(?!null$)", each) for each in overrides)


def _own_weights(checked: CheckedRecipe) -> list[str]:
    """The override that loads all of `model.weights`; none if the recipe has none."""
    weights = checked.recipe.model.weights
    if weights is None:
        return []
    file = weights if isinstance(weights, str) else weights.file
    return [f"model.weights={json.dumps({'file': file, 'head': 'keep'})}"]


def _splits(named: str | None, checked: CheckedRecipe) -> list[str]:
    """The splits to evaluate: `--split`, else all test sets, else val."""
    known = [split for split in checked.recipe.data.splits() if split != "train"]
    tests = [split for split in known if split.partition(".")[0] == "test"]
    if named is None and known:
        return tests or known
    found = tests if named == "test" else [split for split in known if split == named]
    if not found:
        missing = f"data.{named}" if named else "data.val or data.test"
        there = f"; there is {join_first([f'data.{split}' for split in known], 8)}" if known else ""
        raise UsageError(f"{checked.locate('data')}: there is no {missing} to evaluate{there}")
    return found


def _refuse_random(builder: Builder, run: Run) -> None:
    """Raise CheckpointError unless the weights file fills every parameter."""
    loaded = set(builder.fitted.loaded) if builder.fitted else set()
    random = [name for name, _ in run.model.named_parameters() if name not in loaded]
    if random:
        raise CheckpointError(
            f"{builder.checked.locate('model.weights')}: the file lacks {pluralize(len(random), 'parameter')} of the"
            f" model, which would stay random: {join_first(random, 5)}"
        )


def _report(
    run: Run, builder: Builder, checkpoint: Checkpoint | None, evaluations: dict[str, Evaluation], options: Any
) -> None:
    """Print the metrics and update the results table."""
    from paceline.data.fingerprint import fingerprint
    from paceline.engine.predictions import predictions_place
    from paceline.run.resume import data_differences

    if checkpoint is not None:
        now = {split: fingerprint(run.evaluations[split].loader.dataset).to_json() for split in evaluations}
        for difference in data_differences(checkpoint, now):
            print(f"warning: the data changed since the run: {difference}", file=sys.stderr)
    measured = str(checkpoint.path) if checkpoint else builder.weights_file()
    _print(measured, checkpoint.step if checkpoint else None, evaluations, options.json)
    problems = [each.problem for each in evaluations.values() if each.problem]
    for split in evaluations if run.save_predictions and not problems else ():
        print(f"predictions are in {predictions_place(run, split)}", file=sys.stderr)
        if evaluations[split].note:
            print(f"warning: {evaluations[split].note}", file=sys.stderr)
    if builder.recipe.logging.results:
        folder = Path(measured)
        if checkpoint:  # its run directory
            folder = checkpoint.path.parent.parent if checkpoint.path.parent.name == "checkpoints" else run.out
        step = checkpoint.step if checkpoint else 0
        numbers = (step, step / run.progress.steps_per_epoch)
        for split, evaluation in evaluations.items():
            _keep(builder.recipe, folder, split, numbers, evaluation, options.overrides)
    if problems:
        raise UsageError(problems[0])


def _keep(
    recipe: Recipe, folder: Path, split: str, numbers: tuple[int, float], measured: Evaluation, overrides: list[str]
) -> None:
    """Update the run's row in the results table; a failure is only a warning."""
    from paceline.loggers.results import About, Result, read_state, write_results

    about = About(recipe.name, recipe.task.name, recipe.model.name)
    settings = " ".join(each for each in overrides if not each.startswith(_WITHOUT_EFFECT))
    state = read_state(folder) if folder.is_dir() else "weights"
    counts = (measured.num_samples, measured.num_skipped)
    result = Result(about, folder, split, state, *numbers, *counts, dict(measured.metrics), settings)
    try:
        write_results(Path(recipe.logging.results or "").expanduser(), [result])
    except PacelineError as error:
        print(f"warning: {error}", file=sys.stderr)


def _print(measured: str, step: int | None, evaluations: dict[str, Evaluation], as_json: bool) -> None:
    """Print the metrics of one split, or a table of several."""
    from paceline.loggers.tables import metrics_tables, print_table

    if as_json:
        print_json({"checkpoint": measured, "step": step, **_as_json(evaluations)})
        return
    where = measured if step is None else f"step {step}, {measured}"
    for split, each in evaluations.items():
        skipped = f" ({each.num_skipped:,} skipped)" if each.num_skipped else ""
        print(f"{split}, {pluralize(each.num_samples, 'sample')}{skipped}, {where}", file=sys.stderr)
    if len(evaluations) > 1:
        for number, table in enumerate(metrics_tables({split: each.metrics for split, each in evaluations.items()})):
            print(end="\n" * (number > 0))
            print_table(*table, num_words=4 if number else 1)
        return
    (metrics,) = (each.metrics for each in evaluations.values())
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"{name:<{width}}  {format_metric(value)}")


def _as_json(evaluations: dict[str, Evaluation]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {"num_samples": {}, "num_skipped": {}, "metrics": {}}
    for split, each in evaluations.items():
        name = split.removeprefix("test.")
        for key, by_name in found.items():
            by_name[name] = getattr(each, key)
    if len(evaluations) > 1:
        return {"split": "test", **found}
    (split,) = evaluations
    return {"split": split, **{key: next(iter(by_name.values())) for key, by_name in found.items()}}
