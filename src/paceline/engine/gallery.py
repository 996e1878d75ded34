"""Pictures of a run, drawn by its task and kept in the run directory."""

from __future__ import annotations

from pathlib import Path

from paceline.core.picture import save_png
from paceline.engine.evaluate import Evaluation
from paceline.engine.run import Run
from paceline.observe.events import Drawn, Note
from paceline.tasks.task import Picture

_NUM_SAMPLES = 24


def draw_samples(run: Run) -> None:
    """The first training samples as the model gets them, augmented."""
    if run.pictures and run.mesh.is_main:
        ids = run.batches.order.at(0, 0, min(_NUM_SAMPLES, run.batches.updates.size))
        batch = run.source.finish(run.source.fetch(0, ids), 0, run.mesh.device)
        _hang(run, "train", {"samples": run.task.picture(batch, None)})


def draw_evaluation(run: Run, evaluation: Evaluation) -> None:
    """Some samples with their predictions, and figures that are better looked at than read."""
    if run.pictures and run.mesh.is_main:
        predictions = run.task.picture(*evaluation.pictured) if evaluation.pictured else None
        _hang(run, evaluation.split, {**run.task.tables(evaluation.tables), "predictions": predictions})


def _hang(run: Run, split: str, drawn: dict[str, Picture | None]) -> None:
    """Write pictures; where that fails the run goes on without them."""
    paths: dict[str, Path] = {}
    try:
        for name, picture in drawn.items():
            if picture is not None:
                paths[name] = run.out / "pictures" / f"{split}-{name}-{run.progress.step:08d}.png"
                save_png(picture, paths[name])
    except OSError as error:
        run.observer.emit(Note(f"cannot write pictures: {error}; training goes on", "warning"))
        return
    run.observer.emit(Drawn(run.progress.step, split, paths))
