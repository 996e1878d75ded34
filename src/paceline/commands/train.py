"""`paceline train`: from a recipe to a trained model, or on from where it stopped."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.attempts import watch_over
from paceline.commands.directory import recipe_differences, refuse_foreign, write_recipe
from paceline.commands.opening import check_writable, read_recipe
from paceline.commands.ownership import Ownership, check_free, own
from paceline.core.errors import CheckpointError, Stopped, UsageError
from paceline.launch.environment import find_place, is_supervised, restart_count
from paceline.launch.start import share_out

if TYPE_CHECKING:
    from paceline.engine.run import Run
    from paceline.recipe.build import Builder

_PICTURE = re.compile(r"(?P<split>train|val|test)-(?P<name>.+)-(?P<step>\d{8,})")


def main(options: argparse.Namespace) -> int:
    """Train; 0 when the run is finished."""
    checked = read_recipe(options)
    out: Path = options.out or Path("runs") / checked.recipe.name
    if options.fresh and options.start:
        raise UsageError("--fresh and --from exclude each other: --from continues a checkpoint, --fresh starts over")
    check_writable(out)
    refuse_foreign(out)
    # Among several processes, or machines, the first one takes the directory for all.
    if find_place(os.environ) is None and options.rendezvous is None:
        check_free(out)
    code = share_out(options, checked.recipe.train.device, checked.recipe.train.devices)
    if code is not None:
        return code

    # The recipe is known to be right: from here on torch is needed.
    from paceline.recipe.build import Builder

    builder = Builder(checked)
    with builder.mesh.together(), own(out) if builder.mesh.is_main else nullcontext() as ownership:
        run = builder.run(out)
        mapping = getattr(options, "device_mapping", None)
        taken = ownership.notes if ownership else []
        notes = [*([mapping] if mapping else []), *taken, *_find_place(run, options, builder, ownership)]
        if run.progress.step and run.progress.is_done and _was_finished(out):
            _say_finished(run)
            return 0
        _open_directory(run, builder)
        _list_skipped(run)
        watch_over(run, builder.recipe.train.hang_seconds)
        _train(run, builder, notes)
    return 0


def _list_skipped(run: Run) -> None:
    """Have samples that are left out listed in the run directory, and told where everything is told."""
    from paceline.observe.events import Note

    for source in (run.source, *(each.source for each in run.evaluations.values())):
        if source.skips is not None:
            source.skips.open(run.out / "skipped.jsonl", lambda text: run.observer.emit(Note(text, "warning")))


def _say_finished(run: Run) -> None:
    if run.mesh.is_main:
        done = f"{run.progress.step} of {run.progress.total_steps} steps are done"
        print(f"{run.out} is finished: {done}", file=sys.stderr)
        hint = f"measure it with: paceline eval {run.out}; start over with --fresh; or raise train.epochs"
        print(hint, file=sys.stderr)


def _was_finished(out: Path) -> bool:
    """Whether nothing was left to do: after the last step there may still be a split to measure."""
    try:
        status = json.loads((out / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(status, dict) and status.get("state") == "finished"


def _find_place(run: Run, options: argparse.Namespace, builder: Builder, ownership: Ownership | None) -> list[str]:
    """Start from the named checkpoint, else the newest valid one, else the recipe's weights, else random; say which."""
    is_first_start = restart_count() == 0  # what comes back after a crash goes on from where it was
    if options.fresh and is_first_start:
        kept = []
        if ownership and (aside := ownership.start_over()):
            kept = [f"the earlier run is kept as {aside}"]
        run.mesh.barrier()
        return [*kept, *builder.origin_of_weights()]
    newest = run.store.newest()
    notes = [f"not used: {reason}" for reason in (newest.rejected if newest else run.store.rejected)]
    checkpoint = newest
    if options.start and (is_first_start or newest is None):
        checkpoint = run.store.open(options.start)
        if newest and newest.step > checkpoint.step:
            raise CheckpointError(
                f"{run.out} holds step {newest.step}, newer than step {checkpoint.step} of {options.start};"
                " nothing newer is overwritten: choose another directory with --out"
            )
    if checkpoint is None:
        return [*notes, *builder.origin_of_weights()]
    differences = recipe_differences(checkpoint.state["recipe"], run.recipe)
    if differences:
        listed = "\n  ".join(differences)
        raise CheckpointError(
            f"{checkpoint.path} was made with another recipe:\n  {listed}\n"
            "change the recipe back, start over with --fresh, or choose another directory with --out"
        )
    run.restore(checkpoint)
    return [*notes, f"weights  from {checkpoint.path}, step {checkpoint.step}"]


def _open_directory(run: Run, builder: Builder) -> None:
    """Make the run directory, cut its records back to where the run stands, and attach what writes them."""
    from paceline.observe.console import Console
    from paceline.observe.events import Note, Observer, Sink
    from paceline.observe.jsonl import MetricsFile, read_records, truncate_after
    from paceline.observe.logfile import LogFile
    from paceline.observe.results import About, ResultsRow
    from paceline.observe.status import StatusFile
    from paceline.observe.tensorboard import TensorBoardSink, rebuild

    if run.mesh.is_main:
        (run.out / "logs").mkdir(parents=True, exist_ok=True)
    run.mesh.barrier()
    if not run.mesh.is_main:
        run.observer = Observer([LogFile(run.out / "logs" / f"rank-{run.mesh.rank}.log")])
        return
    write_recipe(run.out / "recipe.yaml", run.recipe, builder.checked)
    metrics, tensorboard = run.out / "metrics.jsonl", run.out / "tensorboard"
    sinks: list[Sink] = [Console(), StatusFile(run.out / "status.json", run.progress.total_steps), MetricsFile(metrics)]
    sinks.append(LogFile(run.out / "logs" / f"rank-{run.mesh.rank}.log"))
    if metrics.exists():
        truncate_after(metrics, run.progress.step)
    pictures = _pictures(run)
    if builder.recipe.observe.tensorboard:
        if tensorboard.exists():
            rebuild(tensorboard, read_records(metrics), pictures)
        sinks.append(TensorBoardSink(tensorboard))
    recipe = builder.recipe
    if recipe.observe.results:
        about = About(recipe.name, recipe.task.name, recipe.model.name)
        table = Path(recipe.observe.results).expanduser()
        sinks.append(ResultsRow(table, run.out, about, lambda text: run.observer.emit(Note(text, "warning"))))
    run.observer = Observer(sinks)


def _pictures(run: Run) -> list[tuple[int, str, Path]]:
    """The pictures drawn so far as (step, tag, file); those of steps that will be done again are removed."""
    found = []
    for path in sorted((run.out / "pictures").glob("*-*-*.png")):
        ours = _PICTURE.fullmatch(path.stem)
        if ours is None:
            continue
        split, name, step = ours["split"], ours["name"], int(ours["step"])
        if step > run.progress.step:
            path.unlink()
        else:
            found.append((step, f"{split}/{name}", path))
    return found


def _train(run: Run, builder: Builder, notes: list[str]) -> None:
    from paceline.commands.summary import closing_lines, opening_lines
    from paceline.engine.evaluate import evaluate_with_average
    from paceline.engine.loop import publish, train
    from paceline.observe.events import Ended, Note, Started

    progress, observer = run.progress, run.observer
    run.batches.tell = lambda text: observer.emit(Note(text))
    started = time.monotonic()
    observer.emit(
        Started(
            name=run.name,
            out=run.out,
            device=str(run.mesh.device),
            world=run.mesh.world,
            total_steps=progress.total_steps,
            steps_per_epoch=progress.steps_per_epoch,
            resumed_step=progress.step,
            lines=[*opening_lines(builder, run), *notes],
        )
    )
    try:
        train(run)
        if "test" in run.evaluations:
            publish(run, evaluate_with_average(run, "test"))
        lines = closing_lines(run, builder.recipe.expect, time.monotonic() - started)
        observer.emit(Ended("finished", progress.step, progress.epoch, lines))
    except BaseException as error:
        state = "stopped" if isinstance(error, Stopped) else "failed"
        reason = str(error) or type(error).__name__
        lines = [_how_to_go_on(run)]
        # Of several processes the launcher knows which one failed first, and says so.
        is_told = is_supervised() and not isinstance(error, Stopped)
        observer.emit(Ended(state, progress.step, progress.epoch, lines, reason, is_told))
        raise
    finally:
        observer.close()


def _how_to_go_on(run: Run) -> str:
    from paceline.checkpoint.reading import step_folders

    if step_folders(run.store.root):
        return f"state is in {run.out}; the same command continues it"
    return f"nothing was saved in {run.out} yet; the same command begins again"
