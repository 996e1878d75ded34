"""Images of a run: samples with their predictions, and metrics, drawn by its task and written as PNG files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.core.atomic_write import replace_file
from paceline.core.text import evenly_spaced
from paceline.core.user_code import described
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.engine.run import Run
from paceline.loggers.events import Note, Visualized
from paceline.metrics.metric import pack, unpack
from paceline.visualize.grid import LegendEntry, Panel, image_grid
from paceline.visualize.image import Image, fit, save_png

Panels = dict[int, list[Panel]]
"""What was drawn of each sample, by its id."""

NUM_WORST = 12
_MAX_SIDE = 512  # pixels of a panel


class WorstSample(NamedTuple):
    """A sample, how wrong its prediction is, and both drawn."""

    sample: int
    error: float
    panels: Sequence[Panel]


class Drawn(NamedTuple):
    """What an evaluation drew, the same on any number of processes."""

    panels: Panels
    """Of evenly spaced samples."""
    worst: Sequence[WorstSample]
    """The samples with the greatest errors, the greatest first."""


class Visualizer:
    """Draws some samples of a split with their predictions: evenly spaced ones, and those with the greatest errors.

    Each process draws those that it predicts, while it has them, so that only small images are kept and sent. Whatever
    the task raises becomes `problem`: no image is worth an evaluation.
    """

    def __init__(self, run: Run, size: int) -> None:
        self.problem: str | None = None
        self._task, self._world = run.task, run.world
        self._ids = set(evenly_spaced(size, _num_visualized(run)))
        self._ranking = Ranking(run.task)
        self._panels: Panels = {}

    def add(self, batch: Batch, predictions: Any) -> None:
        """Draw the selected samples of a batch."""
        if not self._ids or self.problem:
            return
        try:
            chosen = self._ids | self._ranking.add(batch, predictions)
            for index, sample in enumerate(batch.ids.tolist()):
                if sample in chosen:
                    self._panels[sample] = [_checked(panel) for panel in self._task.draw(batch, predictions, index)]
            for sample in set(self._panels) - self._ids - self._ranking.samples:
                self._panels.pop(sample, None)
        except Exception as error:  # noqa: BLE001 - a task, and a user's too, may raise anything
            self.problem = f"cannot draw predictions: {described(error)}"

    def gather(self) -> Drawn:
        """Return what all ranks drew; all ranks must call it."""
        if not self._ids:
            return Drawn({}, [])
        panels: Panels = {}
        errors = self._ranking.gather(self._world)
        kept = {sample: own for sample, own in self._panels.items() if sample in self._ids or sample in errors}
        for part in self._world.gather(_pack(kept, self.problem)):
            own, problem = _unpack(part)
            panels = own | panels  # padding batches repeat samples of the first process
            self.problem = self.problem or problem
        worst = [WorstSample(sample, error, panels.get(sample, [])) for sample, error in errors.items()]
        return Drawn({sample: panels[sample] for sample in sorted(self._ids & panels.keys())}, worst)


def visualize_samples(run: Run) -> None:
    """Draw the first training samples as the model gets them, augmented."""
    number = min(_num_visualized(run), run.batches.sampler.size)
    if not number or not run.world.is_main:
        return

    def draw() -> dict[str, Image]:
        batch = run.train_loader.transform_batch(
            run.train_loader.fetch(0, run.batches.order.at(0, 0, number)), 0, run.world.device
        )
        return _draw_grid("samples", [run.task.draw(batch, None, index) for index in range(batch.size)])

    _write(run, "train", draw)


def visualize_evaluation(run: Run, split: str, tables: dict[str, Any], drawn: Drawn) -> None:
    """Draw the metrics of an evaluation, some samples with their predictions, and the worst ones."""
    if not run.visualize or not run.world.is_main:
        return
    if drawn.worst:
        about = {"step": run.progress.step, "error": getattr(run.task, "error_name", "error")}
        with _reported(run, split):
            write_worst(run.out / "worst", split, about, drawn.worst, run.evaluations[split].loader.dataset)
    _write(run, split, lambda: run.task.draw_metrics(tables))
    _write(run, split, lambda: _draw_grid("predictions", list(drawn.panels.values())))


def _num_visualized(run: Run) -> int:
    return run.task.num_visualized if run.visualize else 0


def _draw_grid(name: str, samples: Sequence[Sequence[Panel]]) -> dict[str, Image]:
    drawn = [panels for panels in samples if panels]
    return {name: image_grid(drawn)} if drawn else {}


def _write(run: Run, split: str, draw: Callable[[], Mapping[str, Image]]) -> None:
    """Draw and write images, as far as that succeeds."""
    paths: dict[str, Path] = {}
    with _reported(run, split):
        for name, image in draw().items():
            path = run.out / "images" / f"{split}-{name}-{run.progress.step:08d}.png"
            save_png(image, path)
            paths[name] = path
    if paths:
        run.logger.emit(Visualized(run.progress.step, split, paths))


@contextmanager
def _reported(run: Run, split: str) -> Iterator[None]:
    """A context for drawing: if that fails, whatever the task raises, training continues without it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - no image is worth a run
        problem = f"cannot draw {split} at step {run.progress.step}: {described(error)}"
        run.logger.emit(Note(f"{problem}; training continues", "warning"))


def _checked(panel: Panel) -> Panel:
    """Return a panel that can be sent: of exactly the declared types, and not too large."""
    image = np.ascontiguousarray(panel.image)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"expected an image of type uint8 and shape [H, W, 3], got {image.dtype} {list(image.shape)}")
    small = fit(image, _MAX_SIDE) if max(image.shape) > _MAX_SIDE else image
    is_correct = None if panel.is_correct is None else bool(panel.is_correct)
    legend = [
        LegendEntry(int(order), str(name), None if color is None else (int(color[0]), int(color[1]), int(color[2])))
        for order, name, color in panel.legend
    ]
    return Panel(small, str(panel.caption), is_correct, tuple(legend))


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
        errors = _checked_errors(self._measure(predictions, batch), batch.size)
        with self._lock:
            self._errors = _worst(self._errors | dict(zip(batch.ids.tolist(), errors, strict=True)))
            return self._errors.keys() & set(batch.ids.tolist())

    @property
    def samples(self) -> set[int]:
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


def _checked_errors(errors: Any, size: int) -> list[float]:
    if not isinstance(errors, Tensor) or errors.shape != (size,):
        found = list(errors.shape) if isinstance(errors, Tensor) else type(errors).__name__
        raise ValueError(f"sample_errors gave {found}, expected a tensor of {size} numbers, one for each sample")
    values: list[float] = errors.detach().double().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).tolist()
    return values


def _pack(panels: Panels, problem: str | None) -> Tensor:
    """The panels as bytes: what is said of each as JSON, and the images."""
    about = [problem, {sample: [panel[1:] for panel in own] for sample, own in panels.items()}]
    text = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    images = {f"{sample}/{number}": panel.image for sample, own in panels.items() for number, panel in enumerate(own)}
    return pack({"about": text, **{name: torch.tensor(image) for name, image in images.items()}})


def _unpack(packed: Tensor) -> tuple[Panels, str | None]:
    found = unpack(packed)
    problem, about = json.loads(found["about"].numpy().tobytes())

    def panel(name: str, caption: str, is_correct: bool | None, legend: list[Any]) -> Panel:
        entries = tuple(LegendEntry(order, label, color and tuple(color)) for order, label, color in legend)
        return Panel(found[name].numpy(), caption, is_correct, entries)

    named = {
        int(sample): [panel(f"{sample}/{number}", *each) for number, each in enumerate(own)]
        for sample, own in about.items()
    }
    return named, problem
