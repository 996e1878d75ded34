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
from paceline.data.io.mask import decode_runs
from paceline.data.split_loader import Dataset
from paceline.engine.evaluate import collect_states
from paceline.engine.prediction_tables import class_results, output_arrays
from paceline.engine.predictions import (
    GuardedWriters,
    Kind,
    PredictionWriter,
    file_names,
    file_writers,
    kind_of,
    row_metric,
    table_extension,
)
from paceline.engine.run import EvaluationSet, Run
from paceline.metrics.metric import State
from paceline.tasks.task import Task
from paceline.visualize.grid import Panel, image_grid, tile_frames
from paceline.visualize.image import Image, fit, save_jpeg, to_image, to_rgb

_MAX_SIDE = 1024  # pixels of a drawn image
_CLIP_SIDE = 320
_DRAWS = ("draw_prediction", "draw")
_OF_PEOPLE = ("keypoints", "keypoint_scores")  # that are detected


class Predicted(NamedTuple):
    """The counts of a prediction run."""

    num_samples: int
    num_skipped: int
    problem: str | None
    """Why something could not be written."""


def predict(
    run: Run,
    inputs: EvaluationSet,
    writers: Sequence[PredictionWriter],
    progress: Callable[[int, int], None] = lambda number, total: None,
) -> Predicted:
    """Predict all inputs and have the writers keep what is predicted; inputs that cannot be read are skipped.

    `progress` is called with the number of inputs of each batch of this rank, and that of all inputs.
    """
    size, guarded = len(inputs.loader.dataset), GuardedWriters(writers, run.world)

    def keep(batch: Batch, predictions: Any) -> None:
        guarded.save(batch, predictions)
        progress(batch.size, size)

    states, unread = collect_states(run, "predict", inputs, guarded.metrics, keep)
    problem = guarded.finish(states)
    return Predicted(size - len(unread), len(unread), problem)


def prediction_writers(folder: Path, dataset: Dataset, task: Task, draws: bool) -> list[PredictionWriter]:
    """What writes predictions below a folder: PNG maps, COCO JSON of objects and keypoints, or a table; and images."""
    maps = folder / ("masks" if kind_of(task) in ("maps", "instances") else "outputs")
    table = (folder / "predictions").with_suffix(table_extension(task))
    writers = file_writers(task, dataset, maps, table)
    return [*writers, DrawnImages(folder / "images", dataset, task)] if draws else writers


def placeholder(task: Task) -> Callable[[int, int], Sample]:
    """The fields that stand for the labels that the inputs of a task lack, given the height and width of an image."""
    return _PLACEHOLDERS[kind_of(task)]


def every_placeholder(height: int, width: int) -> Sample:
    """The fields that stand for any task's labels."""
    return _no_mask(height, width) | _no_person(height, width) | _no_label(height, width)


def _no_mask(height: int, width: int) -> Sample:
    return {"mask": np.zeros((height, width), np.uint8)}


def _no_boxes(height: int, width: int) -> Sample:
    fields: Sample = {"boxes": np.zeros((0, 4), np.float32), "classes": np.zeros(0, np.int64)}
    return fields | {"crowd": np.zeros(0, np.bool_), "area": np.zeros(0, np.float32)}


def _no_instances(height: int, width: int) -> Sample:
    return {**_no_boxes(height, width), "masks": np.zeros((0, height, width), np.uint8)}


def _no_person(height: int, width: int) -> Sample:
    return {**_no_boxes(height, width), "keypoints": np.zeros((0, 1, 3), np.float32)}


def _no_label(height: int, width: int) -> Sample:
    return {"label": 0}


_PLACEHOLDERS: dict[Kind, Callable[[int, int], Sample]] = {
    "maps": _no_mask,
    "keypoints": _no_person,
    "boxes": _no_boxes,
    "instances": _no_instances,
    "classes": _no_label,
    "outputs": lambda height, width: {},
}


class DrawnImages(PredictionWriter):
    """Writes each input with its prediction drawn, as large as it is, or 1024 pixels at most."""

    def __init__(self, folder: Path, dataset: Dataset, task: Task) -> None:
        self._folder, self._dataset, self._task = folder, dataset, task
        self._names = [f"{name.removesuffix('.png')}.jpg" for name in file_names(dataset)]
        own = [getattr(type(task), name, getattr(Task, name)) is not getattr(Task, name) for name in _DRAWS]
        self._has_draw_only = own == [False, True]

    def save(self, batch: Batch, predictions: Any) -> None:
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


class ResultList(PredictionWriter):
    """Keeps predictions in memory, for use from Python: a dict for each input, None for one that cannot be read."""

    def __init__(self, size: int, task: Any) -> None:
        self.results: list[dict[str, Any] | None] = [None] * size
        self._task, self._kind = task, kind_of(task)
        self.metrics = [row_metric(task)] if self._kind == "classes" else []

    def save(self, batch: Batch, predictions: Any) -> None:
        for sample, result in zip(batch.ids.tolist(), self._results(batch, predictions), strict=False):
            self.results[sample] = result

    def _results(self, batch: Batch, predictions: Any) -> list[dict[str, Any]]:
        """What is known of each sample now: nothing of classes."""
        if self._kind == "maps":
            return [{"mask": found} for found in self._task.maps(predictions)]
        finds_people = self._kind == "keypoints" and isinstance(predictions, list)
        if self._kind in ("boxes", "instances") or finds_people:
            fields = ("boxes", "scores", "labels", *(_OF_PEOPLE if finds_people else ()))
            arrays = [{name: getattr(each, name).cpu().numpy() for name in fields} for each in predictions]
            if self._kind == "instances":
                masks = (decode_runs(each.runs, *each.size) for each in predictions)
                arrays = [{**each, "masks": found} for each, found in zip(arrays, masks, strict=True)]
            classes = self._task.classes
            return [{**each, "names": [classes[label] for label in each["labels"].tolist()]} for each in arrays]
        if self._kind == "keypoints":
            names = list(self._task.joints.names)
            places, scores = predictions.keypoints.cpu().numpy(), predictions.scores.cpu().numpy()
            return [
                {"keypoints": one, "scores": score, "names": list(names)}
                for one, score in zip(places, scores, strict=True)
            ]
        return [] if self._kind == "classes" else output_arrays(self._task, predictions, batch.size)

    def finish(self, states: Sequence[State]) -> None:
        """Take the classes of all samples."""
        for metric, state in zip(self.metrics, states, strict=True):
            rows = metric.compute(state)
            results = class_results(rows, self._task.classes)
            for sample, result in zip(rows["sample"].tolist(), results, strict=True):
                self.results[sample] = result
