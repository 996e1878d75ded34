"""The loggers of a run directory: console, files, tables and trackers, cut back to the run's current step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from paceline.core.atomic_write import remove_partial_files, replace_file
from paceline.engine.run import Run
from paceline.loggers.console import Console
from paceline.loggers.events import Logger, LoggerGroup, Note
from paceline.loggers.files import ClassTable, ConfusionFile, LogFile, StartsFile, StatusFile, environment
from paceline.loggers.jsonl import JsonlLogger, read_records, truncate_after
from paceline.loggers.results import About, ResultsRow
from paceline.loggers.tensorboard import TensorBoardLogger, rebuild
from paceline.loggers.trackers import MlflowTracker, Tracker, TrackerLogger, WandbTracker
from paceline.report.page import ReportFile
from paceline.run.summary import expected_directions

_IMAGE = re.compile(r"(?P<name>.+)-(?P<step>\d{8,})")


def open_directory(run: Run) -> None:
    """Create the run directory, truncate its records to the current step, and attach the loggers."""
    if run.world.is_main:
        (run.out / "logs").mkdir(parents=True, exist_ok=True)
        for folder in (run.out, run.out / "images", run.out / "logs" / "heartbeats"):
            remove_partial_files(folder)
    run.world.barrier()
    log_file = LogFile(run.out / "logs" / f"rank-{run.world.rank}.log")
    if not run.world.is_main:
        run.logger = LoggerGroup([log_file])
        return
    if run.info.recipe_yaml:
        replace_file(run.out / "recipe.yaml", run.info.recipe_yaml.encode(errors="backslashreplace"))
    metrics, tensorboard = run.out / "metrics.jsonl", run.out / "tensorboard"
    sinks: list[Logger] = [
        Console(),
        StatusFile(run.out / "status.json", run.progress.total_steps),
        JsonlLogger(metrics),
        log_file,
    ]
    if metrics.exists():
        truncate_after(metrics, run.progress.step, run.pending_splits)
    images = _images(run)
    if run.info.tensorboard:
        if tensorboard.exists():
            rebuild(tensorboard, read_records(metrics), images)
        sinks.append(TensorBoardLogger(tensorboard))
    if run.info.results:
        about = About(run.name, run.info.task, run.info.model)
        sinks.append(ResultsRow(run.info.results, run.out, about, partial(_warn, run)))
    sinks += [ConfusionFile(run.out / "tables", getattr(run.task, "classes", [])), ClassTable(run.out / "tables")]
    about_start = environment() | {"higher_is_better": expected_directions(run)}
    sinks.append(StartsFile(run.out / "logs" / "starts.jsonl", about_start))
    if run.info.recipe_yaml:
        sinks.append(ReportFile(run.out, partial(_warn, run)))
    run.logger = LoggerGroup([*sinks, *_trackers(run)])


def _trackers(run: Run) -> Iterator[Logger]:
    trackers: dict[str, Tracker] = {}
    if run.info.wandb:
        trackers["wandb"] = WandbTracker(run.out, run.state.recipe, **run.info.wandb)
    if run.info.mlflow:
        trackers["mlflow"] = MlflowTracker(run.out, run.state.recipe, **run.info.mlflow)
    for name, tracker in trackers.items():
        records = read_records(run.out / "metrics.jsonl")
        yield TrackerLogger(name, tracker, partial(_warn, run), records)


def _images(run: Run) -> list[tuple[int, str, Path]]:
    """The images so far as (step, tag, file); those that will be drawn again are removed."""
    found = []
    for path in sorted((run.out / "images").glob("*-*-*.png")):
        # The name of a test set may have hyphens too.
        splits = [split for split in ("train", *run.evaluations) if path.name.startswith(f"{split}-")]
        split = max(splits, key=len, default="")
        ours = _IMAGE.fullmatch(path.stem.removeprefix(f"{split}-"))
        if ours is None or not split:
            continue
        name, step = ours["name"], int(ours["step"])
        is_pending = step == run.progress.step and split in run.pending_splits - {"train"}
        if step > run.progress.step or is_pending:
            path.unlink()
        else:
            found.append((step, f"{split}/{name}", path))
    return found


def list_skipped(run: Run) -> None:
    """List skipped samples in the run directory and log them."""
    for source in (run.train_loader, *(each.loader for each in run.evaluations.values())):
        if source.skips is not None:
            source.skips.open(run.out / "skipped.jsonl", partial(_warn, run))


def _warn(run: Run, text: str) -> None:
    run.logger.emit(Note(text, "warning"))
