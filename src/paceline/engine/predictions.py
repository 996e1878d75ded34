"""Predictions as files: maps as PNG at the original size, classes, boxes, keypoints and numbers as tables."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.agreement import gather_texts
from paceline.core.atomic_write import replace_file
from paceline.core.errors import UsageError
from paceline.core.text import pluralize
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.data.split_loader import Dataset
from paceline.engine import prediction_tables as tables
from paceline.engine.run import Run
from paceline.metrics.metric import Metric, State
from paceline.visualize.colors import Color

Map = NDArray[np.uint8]
Kind = Literal["maps", "instances", "keypoints", "boxes", "classes", "outputs"]
_KINDS: dict[str, Kind] = {
    "instance_metric": "instances",
    "maps": "maps",
    "keypoint_metric": "keypoints",
    "detection_metric": "boxes",
    "prediction_metric": "classes",
}
_TABLES: dict[Kind, tuple[str, tables.Formatter]] = {
    "classes": (".csv", tables.class_table),
    "boxes": (".json", tables.coco_boxes),
    "instances": (".json", tables.coco_instances),
    "keypoints": (".json", tables.coco_keypoints),
    "outputs": (".csv", tables.output_table),
}
"""The extension and the content of what is written of all samples together."""


def kind_of(task: object) -> Kind:
    """What a task predicts, by the method that it has; tensors, or dicts of tensors, if it has none of these.

    - `instance_metric()`: collects detections and their masks, see `metrics.instances`; `instance_maps(predictions)`
      gives what is saved of each sample, the ids of instances as uint16 [H, W], and how many have none.
    - `maps(predictions)`: what is saved of each sample, uint8 [H, W]; `palette` has the colors of its ids, None: grays.
    - `keypoint_metric()` of one person: collects "poses" [N, 3 + 3 J], see `metrics.keypoints`; `joints` has the names.
    - `detection_metric()`: collects "detections" [K, 8], see `metrics.detection`.
    - `prediction_metric()`: collects "sample" [N], the number that a row is called by; "file" [N], that of the sample
      whose file it is; "truth" and "predicted", bool [N, C]; "probabilities" [N, C], or [N, 1] of what is predicted. If
      "multi_label" is False, a result is one class instead of a list.
    """
    return _KINDS.get(_method_of(task), "outputs")


def row_metric(task: Any) -> Metric:
    """What collects the rows of a task's tables."""
    method = _method_of(task)
    metric: Metric = getattr(task, method)() if method else tables.OutputRows(task)
    return metric


def _method_of(task: object) -> str:
    return next((method for method in _KINDS if hasattr(task, method)), "")


class PredictionWriter:
    """Writes the predictions of one evaluation, on every rank. Raises UsageError if it cannot write."""

    metrics: Sequence[Metric] = ()
    """The metrics that collect what it writes."""
    note = ""
    """A line on what its files do not hold."""

    def save(self, batch: Batch, predictions: Any) -> None:
        """Take the predictions of a batch, in any order."""

    def finish(self, states: Sequence[State]) -> None:
        """Called on rank 0, with the states of its metrics, after all ranks have saved all batches."""


class GuardedWriters:
    """Has writers do their work; a problem with files does not end an evaluation, and is reported at its end."""

    def __init__(self, writers: Sequence[PredictionWriter], world: World) -> None:
        self.metrics = [metric for writer in writers for metric in writer.metrics]
        self._writers, self._world = writers, world
        self._problem: str | None = None
        self.note = ""
        """What the files of any rank do not hold, once it has finished."""

    def save(self, batch: Batch, predictions: Any) -> None:
        """Save the predictions of a batch, unless an earlier save failed."""
        for writer in self._writers:
            self._try(partial(writer.save, batch, predictions))

    def finish(self, states: Sequence[State]) -> str | None:
        """Finish writing, each writer with the states of its own metrics; return the first problem of any rank."""
        if not self._writers:
            return None
        self._agree()  # all have written
        notes = gather_texts(self._world, next((writer.note for writer in self._writers if writer.note), ""))
        self.note = next(filter(None, notes), "")
        left = iter(states)
        for writer in self._writers if self._world.is_main else ():
            self._try(partial(writer.finish, [next(left) for _ in writer.metrics]))
        return self._agree()  # none begins to write again before

    def _try(self, action: Callable[[], None]) -> None:
        if self._problem is None:
            try:
                action()
            except UsageError as error:
                self._problem = str(error)

    def _agree(self) -> str | None:
        self._problem = next(filter(None, gather_texts(self._world, self._problem or "")), None)
        return self._problem


def make_writers(run: Run, split: str, prefix: str = "") -> GuardedWriters:
    """The writers of a split's predictions into the run directory, if `save_predictions` is set."""
    if not run.save_predictions:
        return GuardedWriters([], run.world)
    place, dataset = predictions_place(run, f"{prefix}{split}"), run.evaluations[split].loader.dataset
    folder = place if kind_of(run.task) == "maps" else place.with_suffix("")
    return GuardedWriters(file_writers(run.task, dataset, folder, place), run.world)


def predictions_place(run: Run, split: str) -> Path:
    """The folder of a split's predictions, or their file."""
    return run.out / "predictions" / f"{split}{table_extension(run.task)}"


def table_extension(task: object) -> str:
    """The extension of a task's table; empty for maps, which have none."""
    return _TABLES.get(kind_of(task), ("",))[0]


def file_writers(task: Any, dataset: Dataset, folder: Path, table_file: Path) -> list[PredictionWriter]:
    """The writers of what a task predicts: maps and arrays into a folder, all else into a table."""
    kind = kind_of(task)
    if kind == "maps":
        return [MapFolder(folder, dataset, task.maps, getattr(task, "palette", None))]
    table = PredictionTable(table_file, dataset, task)
    if kind == "instances":
        return [table, InstanceFolder(folder, dataset, task)]
    return [table, ArrayFolder(folder, dataset, task)] if kind == "outputs" else [table]


class MapFolder(PredictionWriter):
    """Writes the maps of a split into a folder; each rank writes its own, in any order."""

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        maps: Callable[[Any], Iterable[Any]],
        palette: Sequence[Color] | None = None,
    ) -> None:
        self._folder, self._maps, self._palette = folder, maps, palette
        self._names = file_names(dataset)

    def save(self, batch: Batch, predictions: Any) -> None:
        """Write the maps of a batch; a file of that name is replaced whole, never seen half-written."""
        self._write_maps(batch, self._maps(predictions))

    def _write_maps(self, batch: Batch, maps: Iterable[NDArray[Any]]) -> None:
        from PIL import Image

        for index, found in zip(batch.ids.tolist(), maps, strict=True):
            image = Image.fromarray(found)
            if self._palette is not None:
                image.putpalette([value for color in self._palette for value in color])
            encoded = io.BytesIO()
            image.save(encoded, format="PNG")
            # Two processes may write the same sample, if one of them only keeps step with the other.
            _write(self._folder / self._names[index], encoded.getvalue())


class InstanceFolder(MapFolder):
    """Writes the ids of instances, and notes in which files some are missing."""

    def __init__(self, folder: Path, dataset: Dataset, task: Any) -> None:
        super().__init__(folder, dataset, task.instance_maps)
        self._left_out: dict[str, int] = {}

    def save(self, batch: Batch, predictions: Any) -> None:
        pairs = list(self._maps(predictions))
        for index, (_, left_out) in zip(batch.ids.tolist(), pairs, strict=True):
            if left_out:
                self._left_out[self._names[index]] = left_out
        self._write_maps(batch, [ids for ids, _ in pairs])

    @property
    def note(self) -> str:  # type: ignore[override]
        if not self._left_out:
            return ""
        name, number = next(iter(self._left_out.items()))
        others = f", as in {pluralize(len(self._left_out) - 1, 'other file')}" if len(self._left_out) > 1 else ""
        found = f"{pluralize(number, 'instance')} left out{others}: more of a class than ids of 16 bits can number"
        return f"{self._folder / name}: {found}; the JSON file has all"


class ArrayFolder(PredictionWriter):
    """Writes outputs with two or more dimensions a sample into .npy files that are named like the inputs."""

    def __init__(self, folder: Path, dataset: Dataset, task: object) -> None:
        self._folder, self._task = folder, task
        self._names = file_names(dataset)

    def save(self, batch: Batch, predictions: Any) -> None:
        of_samples = tables.output_arrays(self._task, predictions, batch.size)
        for sample, outputs in zip(batch.ids.tolist(), of_samples, strict=True):
            for name, value in outputs.items():
                if value.ndim > 1:
                    folder = self._folder if name == "output" else self._folder / name
                    content = io.BytesIO()
                    np.save(content, value, allow_pickle=False)
                    _write(folder / Path(self._names[sample]).with_suffix(".npy"), content.getvalue())


class PredictionTable(PredictionWriter):
    """Writes the predictions of a split into one file, at the end of its evaluation."""

    def __init__(self, path: Path, dataset: Dataset, task: Any) -> None:
        self.metrics = [row_metric(task)]
        self._path, self._dataset = path, dataset
        kind = kind_of(task)
        self._format = _TABLES[kind][1]
        self._names = task.joints.names if kind == "keypoints" else getattr(task, "classes", [])

    def finish(self, states: Sequence[State]) -> None:
        """Write the file, if there is a row; an earlier one is replaced whole, never seen half-written."""
        if rows := self.metrics[0].compute(states[0]):
            # Names of files may be no UTF-8: the file is, so that everything can read it.
            _write(self._path, self._format(rows, self._dataset, self._names).encode(errors="backslashreplace"))


def file_names(dataset: Dataset) -> list[str]:
    """A name with the extension .png for each sample: that of its file below the folder that all files share.

    Where files differ in their extensions alone, names keep those; without files, they are numbers.
    """
    size, path = len(dataset), getattr(dataset, "path", None)
    if path is None:
        return [f"{index:08d}.png" for index in range(size)]
    files = [os.fspath(path(index)) for index in range(size)]
    shared = os.path.commonpath({os.path.dirname(file) for file in files})  # noqa: PTH120 - of many names, as texts
    below = [os.path.relpath(file, shared) for file in files]
    stems = [os.path.splitext(name)[0] for name in below]  # noqa: PTH122
    if len(set(stems)) == size:
        return [f"{stem}.png" for stem in stems]
    if len(set(below)) == size:
        return [f"{name}.png" for name in below]
    return [f"{stem}-{index:08d}.png" for index, stem in enumerate(stems)]


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, is_durable=False)
    except OSError as error:
        raise UsageError(f"{path}: the prediction cannot be written ({error.strerror or error})") from error
