"""Run directories as training leaves them, written by the loggers themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engine.visualizer import WorstSample, write_worst
from paceline.loggers.events import Ended, Evaluated, Logged, LoggerGroup, Started
from paceline.loggers.files import ConfusionFile, StartsFile, StatusFile, environment
from paceline.loggers.jsonl import JsonlLogger
from paceline.visualize.grid import Panel
from paceline.visualize.image import save_png

CLASSES = ["cat", "dog", "<b>bird</b>"]


def write_run(
    folder: Path,
    num_steps: int = 40,
    log_every: int = 2,
    evaluate_every: int = 10,
    top1: Mapping[int, float] | None = None,
    ends: bool = True,
    **settings: Any,
) -> Path:
    """A run whose loss is 1 / step and whose accuracy is given by step, else step / (step + 10)."""
    folder.mkdir(parents=True)
    write_recipe(folder, settings)
    logger = LoggerGroup(
        [
            StatusFile(folder / "status.json", num_steps),
            JsonlLogger(folder / "metrics.jsonl"),
            ConfusionFile(folder / "tables", CLASSES),
            StartsFile(folder / "logs" / "starts.jsonl", {**environment(), "higher_is_better": {"top1": True}}),
        ]
    )
    logger.emit(Started(folder.name, folder, "cpu", 2, num_steps, 10, lines=["model    convnet"], main_metric="top1"))
    for step in range(log_every, num_steps + 1, log_every):
        clock = {"time": 1.8e9 + step, "samples_per_second": 100.0 + step, "data_wait": 0.25, "memory_mb": 512.0}
        metrics = {"loss": 1 / step, "cross_entropy": 1 / step, "grad_norm": math.sqrt(step), "lr": 0.1 * step}
        logger.emit(Logged(step, step / 10, metrics, {}, clock))
        if step % evaluate_every == 0:
            value = (top1 or {}).get(step, step / (step + 10))
            metrics = {"cross_entropy": 2 / step, "loss": 2 / step, "top1": value, "ap.cat": 0.5, "ap.dog": 0.25}
            counts = [[step, 1, 0], [2, step, 1], [0, 0, step]]
            logger.emit(Evaluated(step, step / 10, "val", metrics, 3 * step + 4, 1, {"seconds": 0.5}, counts))
            write_images(folder, step)
    if ends:
        logger.emit(Ended("finished", num_steps, num_steps / 10))
    logger.close()
    return folder


def write_recipe(folder: Path, settings: Mapping[str, Any]) -> None:
    """A recipe with the origin of each value."""
    recipe = {"name": folder.name, "task": {"name": "classification"}, "model": {"name": "convnet"}, **settings}
    lines = [
        f"{key}: {json.dumps(value)}  # recipe.yaml:{line}:3" for line, (key, value) in enumerate(recipe.items(), 1)
    ]
    (folder / "recipe.yaml").write_text("\n".join([*lines, "seed: 0  # default", ""]), encoding="utf-8")


def write_worst_samples(folder: Path, size: int = 3) -> None:
    """What an evaluation on val keeps of its worst samples; the second one could not be drawn."""
    panel = Panel(np.zeros((40, 40, 3), np.uint8), "<i>dog</i>, not cat", False)
    worst = [WorstSample(10 * number, 4.5 - number, [panel] if number != 1 else []) for number in range(size)]
    write_worst(folder / "worst", "val", {"step": 40, "error": "cross-entropy"}, worst, NamedImages())


class NamedImages:
    """A data set that knows its files."""

    def path(self, index: int) -> str:
        """The file of a sample."""
        return f"photos/{index}.jpg"


def write_images(folder: Path, step: int) -> None:
    """What an evaluation draws: stripes in place of predictions."""
    image = np.zeros((60, 200, 3), np.uint8)
    image[:, ::20] = (step % 256, 90, 200)
    for name in ("predictions", "confusion"):
        save_png(image, folder / "images" / f"val-{name}-{step:08d}.png")
