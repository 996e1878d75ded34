"""Predictions for images without labels: written as tables, maps and drawn images, or returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.user_code import described
from paceline.data.batch import Batch, Sample
from paceline.data.split_loader import Dataset
from paceline.engine.evaluate import collect_states
from paceline.engine.outputs import OutputFiles, output_arrays
from paceline.engine.predictions import (
    GuardedWriter,
    PredictionFile,
    PredictionFolder,
    PredictionWriter,
    PredictsBoxes,
    PredictsClasses,
    PredictsKeypoints,
    PredictsMaps,
    class_results,
    file_names,
)
from paceline.engine.run import EvaluationSet, Run
from paceline.engine.visualizer import NoVisualizer
from paceline.metrics.metric import Metric, State
from paceline.tasks.task import Task
from paceline.visualize.grid import Panel, image_grid, tile_frames
from paceline.visualize.image import Image, fit, save_jpeg, to_image, to_rgb

_MAX_SIDE = 1024  # pixels of a drawn image
_CLIP_SIDE = 320
_DRAWS = ("draw_prediction", "draw")
_TABLES = ("predictions.csv", "predictions.jsonl")


class Predicted(NamedTuple):
    """The counts of a prediction run."""

    num_samples: int
    num_skipped: int
    problem: str | None
    """Why something could not be written."""


def predict(run: Run, inputs: EvaluationSet, writer: PredictionWriter) -> Predicted:
    """Predict all inputs and have the writer keep what is predicted; inputs that cannot be read are skipped."""
    guarded = GuardedWriter(writer, run.world)
    states, unread = collect_states(run, "predict", inputs, writer.metrics, guarded, NoVisualizer())
    problem = guarded.finish(states, unread)
    return Predicted(len(inputs.loader.dataset) - len(unread), len(unread), problem)


def placeholder(task: Task) -> Callable[[int, int], Sample]:
    """The fields that stand for the labels that the inputs of a task lack, given the height and width of an image."""
    if isinstance(task, PredictsMaps):
        return _no_mask
    if isinstance(task, PredictsKeypoints):
        return _no_person
    if isinstance(task, PredictsBoxes):
        return _no_boxes
    return _no_label if isinstance(task, PredictsClasses) else _nothing


def every_placeholder(height: int, width: int) -> Sample:
    """The fields that stand for any task's labels."""
    return _no_mask(height, width) | _no_person(height, width) | _no_label(height, width)


def _nothing(height: int, width: int) -> Sample:
    return {}


def _no_mask(height: int, width: int) -> Sample:
    return {"mask": np.zeros((height, width), np.uint8)}


def _no_boxes(height: int, width: int) -> Sample:
    fields: Sample = {"boxes": np.zeros((0, 4), np.float32), "classes": np.zeros(0, np.int64)}
    return fields | {"crowd": np.zeros(0, np.bool_), "area": np.zeros(0, np.float32)}


def _no_person(height: int, width: int) -> Sample:
    return {**_no_boxes(height, width), "keypoints": np.zeros((0, 1, 3), np.float32)}


def _no_label(height: int, width: int) -> Sample:
    return {"label": 0}


class FileWriter:
    """Writes predictions below a folder: PNG maps, COCO JSON of boxes and keypoints, or tables (CSV, JSON lines)."""

    def __init__(
        self, folder: Path, dataset: Dataset, task: Task, draws: bool, progress: Callable[[int, int], None]
    ) -> None:
        self._progress, self._size = progress, len(dataset)
        self._writers: list[PredictionWriter] = []
        if isinstance(task, PredictsMaps):
            self._writers.append(PredictionFolder(folder / "masks", dataset, task))
        elif isinstance(task, PredictsBoxes):
            self._writers.append(PredictionFile(folder / "predictions.json", dataset, task))
        elif isinstance(task, PredictsKeypoints):
            names = ("predictions.csv", "predictions.json")
            self._writers += [PredictionFile(folder / name, dataset, task) for name in names]
        elif isinstance(task, PredictsClasses):
            self._writers += [PredictionFile(folder / name, dataset, task) for name in _TABLES]
        else:
            tables = [folder / name for name in _TABLES]
            self._writers.append(OutputFiles(tables, folder / "outputs", dataset, file_names(dataset), task))
        if draws:
            self._writers.append(DrawnImages(folder / "images", dataset, task))

    @property
    def metrics(self) -> Sequence[Metric]:
        """Those of all writers."""
        return [metric for writer in self._writers for metric in writer.metrics]

    def save(self, batch: Batch, predictions: Any) -> None:
        """Have each writer save the batch."""
        for writer in self._writers:
            writer.save(batch, predictions)
        self._progress(batch.size, self._size)

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> None:
        """Have each writer finish with the states of its own metrics."""
        start = 0
        for writer in self._writers:
            end = start + len(writer.metrics)
            writer.finish(states[start:end], skipped_ids)
            start = end


class DrawnImages:
    """Writes each input with its prediction drawn, as large as it is, or 1024 pixels at most."""

    metrics: Sequence[Metric] = ()

    def __init__(self, folder: Path, dataset: Dataset, task: Task) -> None:
        self._folder, self._dataset, self._task = folder, dataset, task
        self._names = [f"{name.removesuffix('.png')}.jpg" for name in file_names(dataset)]
        own = [getattr(type(task), name, getattr(Task, name)) is not getattr(Task, name) for name in _DRAWS]
        self._has_draw_only = own == [False, True]

    def save(self, batch: Batch, predictions: Any) -> None:
        """Draw and write the samples of a batch."""
        for index, sample in enumerate(batch.ids.tolist()):
            drawn = self._drawn(batch, predictions, index, sample)
            path = self._folder / self._names[sample]
            try:
                save_jpeg(drawn, path)
            except OSError as error:
                raise UsageError(f"{path}: the image cannot be written ({error.strerror or error})") from error

    def _drawn(self, batch: Batch, predictions: Any, index: int, sample: int) -> Image:
        """What the task draws of a sample; a task with `draw` alone draws it as it does in an evaluation."""
        if not self._has_draw_only:
            draw = getattr(self._task, "draw_prediction", partial(Task.draw_prediction, self._task))
            panel: Panel = draw(self._image(batch, index, sample), batch, predictions, index)
            is_large = max(panel.image.shape) > _MAX_SIDE
            return image_grid([[panel._replace(image=fit(panel.image, _MAX_SIDE)) if is_large else panel]])
        try:
            return image_grid([list(self._task.draw(batch, predictions, index))])
        except Exception as error:
            raise UsageError(
                f"task {type(self._task).__name__}: draw failed for an input, which has no target ({described(error)});"
                " use batch.target only if batch.has_target, add draw_prediction, or draw nothing with --no-images"
            ) from error

    def _image(self, batch: Batch, index: int, sample: int) -> Image:
        """The image as it was read, or frames of a video."""
        if batch["image"].ndim > 4:
            clip = batch["image"][index]
            return tile_frames(to_image(clip[0] if clip.ndim == 5 else clip), _CLIP_SIDE)
        image = np.asarray(self._dataset.read(sample)["image"])
        return to_rgb(image if image.dtype == np.uint8 else (image * 255).clip(0, 255).astype(np.uint8))

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> None:
        """Nothing is left to do."""


class ResultList:
    """Keeps predictions in memory, for use from Python: a dict for each input, None for one that cannot be read."""

    def __init__(self, size: int, task: Task) -> None:
        self.results: list[dict[str, Any] | None] = [None] * size
        self._task = task
        self._rows = task.prediction_metric() if isinstance(task, PredictsClasses) else None

    @property
    def metrics(self) -> Sequence[Metric]:
        """What collects the rows of classes."""
        return [self._rows] if self._rows else []

    def save(self, batch: Batch, predictions: Any) -> None:
        """Take the maps, boxes, keypoints or outputs of a batch."""
        ids = batch.ids.tolist()
        if not isinstance(self._task, PredictsMaps | PredictsBoxes | PredictsClasses | PredictsKeypoints):
            for sample, outputs in zip(ids, output_arrays(self._task, predictions, batch.size), strict=True):
                self.results[sample] = dict(outputs)
        for index, sample in enumerate(ids):
            if isinstance(self._task, PredictsMaps):
                self.results[sample] = {"mask": self._task.maps(predictions)[index]}
            elif isinstance(self._task, PredictsBoxes):
                found = {name: value.cpu().numpy() for name, value in predictions[index]._asdict().items()}
                names = [self._task.classes[label] for label in found["labels"].tolist()]
                self.results[sample] = {**found, "names": names}
            elif isinstance(self._task, PredictsKeypoints):
                places = {name: getattr(predictions, name)[index].cpu().numpy() for name in ("keypoints", "scores")}
                self.results[sample] = {**places, "names": list(self._task.joints.names)}

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> None:
        """Take the classes of all samples."""
        if self._rows and isinstance(self._task, PredictsClasses):
            rows = self._rows.compute(states[0])
            results = class_results(rows, self._task.classes)
            for sample, result in zip(rows["sample"].tolist(), results, strict=True):
                self.results[sample] = result
