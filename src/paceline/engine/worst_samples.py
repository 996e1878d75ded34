"""The worst samples of an evaluation: those with the greatest errors, exact on any number of processes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.atomic_write import replace_file
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.visualize.grid import Panel, image_grid
from paceline.visualize.image import save_png

NUM_WORST = 12


class WorstSample(NamedTuple):
    """A sample, how wrong its prediction is, and both drawn."""

    sample: int
    error: float
    panels: Sequence[Panel]


class Ranking:
    """The samples with the greatest errors among those seen, in any order; of equal ones those with the least ids.

    Errors are what the task's `sample_errors` gives; a task without it ranks nothing. One that is NaN is the greatest.
    """

    def __init__(self, task: object) -> None:
        self._measure = getattr(task, "sample_errors", None)
        self._errors: dict[int, float] = {}
        self._lock = Lock()  # batches are measured in threads

    def add(self, batch: Batch, predictions: Any) -> set[int]:
        """Rank the samples of a batch; return the ids of those that are among the worst so far."""
        if self._measure is None:
            return set()
        errors = _checked(self._measure(predictions, batch), batch.size)
        with self._lock:
            self._errors = _worst(self._errors | dict(zip(batch.ids.tolist(), errors, strict=True)))
            return self._errors.keys() & set(batch.ids.tolist())

    @property
    def samples(self) -> set[int]:
        """The ids of the worst samples so far."""
        return set(self._errors)

    def gather(self, world: World) -> dict[int, float]:
        """The error of each of the worst samples of all ranks, the greatest first; all ranks must call it."""
        own = torch.tensor(list(self._errors.items()), dtype=torch.float64).reshape(-1, 2)
        return _worst({int(sample): error for part in world.gather(own) for sample, error in part.tolist()})


def write_worst(folder: Path, split: str, about: Mapping[str, Any], worst: Sequence[WorstSample], dataset: Any) -> None:
    """Write SPLIT.json, and an image of each sample beside it, in place of those of the last evaluation."""
    path, samples = getattr(dataset, "path", None), []
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(worst, 1):
        name = f"{split}-{number:02d}.png"
        if each.panels:
            save_png(image_grid([each.panels]), folder / name)
        samples.append(
            {
                "sample": each.sample,
                "path": path and os.fspath(path(each.sample)),
                "error": each.error if math.isfinite(each.error) else None,
                "captions": [panel.caption for panel in each.panels],
                "image": name if each.panels else None,
            }
        )
    content = json.dumps({**about, "samples": samples}, indent=1, ensure_ascii=False)
    replace_file(folder / f"{split}.json", f"{content}\n".encode(errors="backslashreplace"), is_durable=False)


def _worst(errors: Mapping[int, float]) -> dict[int, float]:
    return dict(sorted(errors.items(), key=lambda each: (-each[1], each[0]))[:NUM_WORST])


def _checked(errors: Any, size: int) -> list[float]:
    if not isinstance(errors, Tensor) or errors.shape != (size,):
        found = list(errors.shape) if isinstance(errors, Tensor) else type(errors).__name__
        raise ValueError(f"sample_errors gave {found}, expected a tensor of {size} numbers, one for each sample")
    values: list[float] = errors.detach().double().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).tolist()
    return values
