"""Predictions as files: masks as PNG at the original size, classes as rows of a CSV file."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.agreement import gather_texts
from paceline.core.atomic_write import is_partial, replace_file
from paceline.core.errors import UsageError
from paceline.core.text import as_cell
from paceline.core.world import World
from paceline.data.batch import Batch, KeypointNames
from paceline.data.split_loader import Dataset
from paceline.engine.outputs import OutputFiles
from paceline.engine.run import Run
from paceline.metrics.metric import Metric, State
from paceline.visualize.colors import Color

Map = NDArray[np.uint8]
Rows = Mapping[str, Tensor]
"""What a metric has collected of all samples."""


@runtime_checkable
class PredictsMaps(Protocol):
    """A task that predicts a map for each sample."""

    palette: Sequence[Color] | None
    """The colors of the ids in maps; None: they are shades of gray."""

    def maps(self, predictions: Any) -> list[Map]:
        """What is saved of each sample, uint8 [H, W]."""
        ...


class PredictionWriter(Protocol):
    """Writes the predictions of one evaluation, on every rank. Raises UsageError if it cannot write."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """The metrics that collect what it writes."""
        ...

    def save(self, batch: Batch, predictions: Any) -> None:
        """Take the predictions of a batch, in any order."""
        ...

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> None:
        """Called on rank 0 after all ranks have saved all batches.

        `states` are those of its metrics, `skipped_ids` the samples that cannot be read.
        """
        ...


class NoPredictions:
    """Keeps nothing."""

    metrics: Sequence[Metric] = ()

    def save(self, batch: Batch, predictions: Any) -> None:
        """Nothing."""

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> str | None:
        """None: nothing can fail."""
        return None


class GuardedWriter:
    """Has a writer do its work; a problem with files does not end an evaluation, and is reported at its end."""

    def __init__(self, writer: PredictionWriter, world: World) -> None:
        self.metrics = writer.metrics
        self._writer, self._world = writer, world
        self._problem: str | None = None

    def save(self, batch: Batch, predictions: Any) -> None:
        """Save the predictions of a batch, unless an earlier save failed."""
        if self._problem is None:
            self._try(lambda: self._writer.save(batch, predictions))

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> str | None:
        """Finish writing, and return the first problem of any rank."""
        self._agree()  # all have written
        if self._world.is_main and self._problem is None:
            self._try(lambda: self._writer.finish(states, skipped_ids))
        return self._agree()  # none begins to write again before

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except UsageError as error:
            self._problem = str(error)

    def _agree(self) -> str | None:
        self._problem = next(filter(None, gather_texts(self._world, self._problem or "")), None)
        return self._problem


def make_writer(run: Run, split: str, prefix: str = "") -> GuardedWriter | NoPredictions:
    """The writer of a split's predictions into the run directory, if `save_predictions` is set."""
    if not run.save_predictions:
        return NoPredictions()
    place, dataset = predictions_place(run, f"{prefix}{split}"), run.evaluations[split].loader.dataset
    if isinstance(run.task, PredictsMaps):
        return GuardedWriter(PredictionFolder(place, dataset, run.task), run.world)
    if isinstance(run.task, PredictsClasses | PredictsBoxes | PredictsKeypoints):
        return GuardedWriter(PredictionFile(place, dataset, run.task), run.world)
    arrays = place.with_suffix("")
    return GuardedWriter(OutputFiles([place], arrays, dataset, file_names(dataset), run.task), run.world)


def predictions_place(run: Run, split: str) -> Path:
    """The folder of a split's predictions, or their file."""
    folder, extension = (
        run.out / "predictions",
        "json" if isinstance(run.task, PredictsBoxes | PredictsKeypoints) else "csv",
    )
    return folder / split if isinstance(run.task, PredictsMaps) else folder / f"{split}.{extension}"


class PredictionFolder:
    """Writes the predictions of a split into a folder; each rank writes its own, in any order."""

    metrics: Sequence[Metric] = ()

    def __init__(self, folder: Path, dataset: Dataset, task: PredictsMaps) -> None:
        self.folder = folder
        self._task = task
        self._names = file_names(dataset)

    def save(self, batch: Batch, predictions: Any) -> None:
        """Write the predictions of a batch; a file of that name is replaced whole, never seen half-written."""
        for index, found in zip(batch.ids.tolist(), self._task.maps(predictions), strict=True):
            _write(found, self._task.palette, self.folder / self._names[index])

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> None:
        """Leave no prediction there but those of this evaluation, unless the folder is a link and others may use it."""
        if self.folder.is_symlink() or self.folder.parent.is_symlink():
            return
        skipped = set(skipped_ids)
        _remove_others(self.folder, {name for index, name in enumerate(self._names) if index not in skipped})


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


def _write(found: Map, palette: Sequence[Color] | None, path: Path) -> None:
    from PIL import Image

    image = Image.fromarray(found)
    if palette is not None:
        image.putpalette([value for color in palette for value in color])
    encoded = io.BytesIO()
    image.save(encoded, format="PNG")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may write the same sample, if one of them only keeps step with the other.
        replace_file(path, encoded.getvalue(), is_durable=False)
    except OSError as error:
        raise UsageError(f"{path}: the prediction cannot be written ({error.strerror or error})") from error


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove predictions of other names, those half-written, and the folders that are empty then; nothing else."""
    for place, _, files in os.walk(folder, topdown=False):
        below = os.path.relpath(place, folder)
        old = [file for file in files if _is_prediction(file) and os.path.normpath(f"{below}/{file}") not in names]
        try:
            for file in old:
                (Path(place) / file).unlink(missing_ok=True)
            if place != os.fspath(folder) and not os.listdir(place):  # noqa: PTH208
                Path(place).rmdir()
        except OSError as error:
            raise UsageError(f"{place}: an earlier prediction cannot be removed ({error.strerror or error})") from error


def _is_prediction(file: str) -> bool:
    return file.endswith(".png") or is_partial(file)


_BETWEEN = "|"  # of several classes of one sample


@runtime_checkable
class PredictsClasses(Protocol):
    """A task that has a probability of each class for each sample."""

    classes: list[str]

    def prediction_metric(self) -> Metric:
        """The metric that collects them: values "sample", "file", "truth", "predicted" and "probabilities".

        "sample" [N] is the number that a row is called by, "file" [N] that of the sample whose file it is; "truth" and
        "predicted" are bool [N, C]; "probabilities" are [N, C], or [N, 1] of what is predicted. If "multi_label" is
        False, a result is one class instead of a list.
        """
        ...


@runtime_checkable
class PredictsBoxes(Protocol):
    """A task that detects objects."""

    classes: list[str]

    def detection_metric(self) -> Metric:
        """What collects them: the tensor "detections" [K, 8], see `metrics.detection.detection_rows`."""
        ...


@runtime_checkable
class PredictsKeypoints(Protocol):
    """A task that predicts the keypoints of one person in each image."""

    classes: list[str]
    joints: KeypointNames

    def keypoint_metric(self) -> Metric:
        """What collects them: the tensor "poses" [N, 3 + 3 J], see `metrics.keypoints.pose_rows`."""
        ...


class PredictionFile:
    """Writes the predictions of a split into one file, in the format of its extension, at the end of its evaluation."""

    def __init__(self, path: Path, dataset: Dataset, task: PredictsClasses | PredictsBoxes | PredictsKeypoints) -> None:
        self.path = path
        self._dataset = dataset
        self._names = task.joints.names if isinstance(task, PredictsKeypoints) else task.classes
        self._rows = _row_metric(task)

    @property
    def metrics(self) -> Sequence[Metric]:
        """The metric that gathers the rows on rank 0."""
        return [self._rows]

    def save(self, batch: Batch, predictions: Any) -> None:
        """Do nothing: the states have everything."""

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> None:
        """Write the file; an earlier one is replaced whole, never seen half-written."""
        rows = self._rows.compute(states[0])
        text = (_POSE_FORMATS if "poses" in rows else _FORMATS)[self.path.suffix](rows, self._dataset, self._names)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Names of files may be no UTF-8: the file is, so that everything can read it.
            replace_file(self.path, text.encode(errors="backslashreplace"))
        except OSError as error:
            raise UsageError(f"{self.path}: predictions cannot be written ({error.strerror or error})") from error


def _row_metric(task: PredictsClasses | PredictsBoxes | PredictsKeypoints) -> Metric:
    """What collects the rows of a task's file."""
    if isinstance(task, PredictsKeypoints):
        return task.keypoint_metric()
    return task.detection_metric() if isinstance(task, PredictsBoxes) else task.prediction_metric()


def coco_results(rows: Rows, dataset: Dataset, classes: Sequence[str]) -> str:
    """Detections as COCO's result files have them, and the name of each image's file."""
    path, category_ids = getattr(dataset, "path", None), getattr(dataset, "category_ids", None)
    results = []
    for sample, image, label, score, left, top, right, bottom in rows["detections"].tolist():
        name = {} if path is None else {"file_name": os.fspath(path(int(sample)))}
        category = category_ids[int(label)] if category_ids else int(label) + 1
        box = [round(value, 3) for value in (left, top, right - left, bottom - top)]
        results.append({"image_id": int(image), "category_id": category, "bbox": box, "score": round(score, 6), **name})
    return "[" + ",\n ".join(json.dumps(result) for result in results) + "]\n"


def coco_poses(rows: Rows, dataset: Dataset, names: Sequence[str]) -> str:
    """Keypoints as COCO's result files have them, and the name of each image's file.

    COCO numbers pixels, whose middles lie half a pixel further.
    """
    path, category_ids = getattr(dataset, "path", None), getattr(dataset, "category_ids", None)
    results = []
    for sample, image, score, *places in rows["poses"].tolist():
        name = {} if path is None else {"file_name": os.fspath(path(int(sample)))}
        triples = zip(places[0::3], places[1::3], places[2::3], strict=True)
        keypoints = [value for x, y, own in triples for value in (round(x - 0.5, 3), round(y - 0.5, 3), round(own, 6))]
        category = category_ids[0] if category_ids else 1
        row = {"image_id": int(image), "category_id": category, "keypoints": keypoints, "score": round(score, 6)}
        results.append(row | name)
    return "[" + ",\n ".join(json.dumps(result) for result in results) + "]\n"


def pose_table(rows: Rows, dataset: Dataset, names: Sequence[str]) -> str:
    """Keypoints as a CSV file: a row a sample, with x, y and score of each, in pixels of the image."""
    path = getattr(dataset, "path", None)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [f"{name}.{part}" for name in names for part in ("x", "y", "score")]
    writer.writerow(["sample", *([] if path is None else ["path"]), "score", *map(as_cell, columns)])
    for sample, _, score, *places in rows["poses"].tolist():
        file = [] if path is None else [as_cell(str(path(int(sample))))]
        values = [f"{value:.6g}" if place % 3 == 2 else f"{value:.3f}" for place, value in enumerate(places)]
        writer.writerow([int(sample), *file, f"{score:.6g}", *values])
    return text.getvalue()


def class_lines(rows: Rows, dataset: Dataset, classes: Sequence[str]) -> str:
    """Classes as JSON lines: the file, the predicted classes, and the probability of each class."""
    path = getattr(dataset, "path", None)
    lines = []
    for file, result in zip(rows["file"].tolist(), class_results(rows, classes), strict=True):
        name = {} if path is None else {"path": str(path(file))}
        lines.append(json.dumps({**name, **result}, ensure_ascii=True) + "\n")
    return "".join(lines)


def class_results(rows: Rows, classes: Sequence[str]) -> list[dict[str, Any]]:
    """What is predicted for each sample, and the probability of each class, or of the predicted one alone.

    That is a class, or None where there is no number, or with several labels a list of classes.
    """
    results, has_several = [], rows.get("multi_label", True)
    for predicted, probabilities in zip(rows["predicted"].tolist(), rows["probabilities"].tolist(), strict=True):
        shares = [round(share, 6) for share in probabilities]
        names = list(compress(classes, predicted))
        known = dict(zip(classes if len(shares) == len(classes) else names, shares, strict=False))
        results.append({"predicted": names if has_several else next(iter(names), None), "probabilities": known})
    return results


def class_table(rows: Rows, dataset: Dataset, classes: Sequence[str]) -> str:
    """Classes as a CSV file: a row a sample, with the probability of each class."""
    path = getattr(dataset, "path", None)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    paths = [] if path is None else ["path"]
    is_of_all = rows["probabilities"].shape[1] == len(classes)
    each = classes if is_of_all else []
    has_labels = getattr(dataset, "has_labels", True)
    labels = ["label"] if has_labels else []
    writer.writerow(["sample", *paths, *labels, "predicted", "probability", *map(as_cell, each)])
    columns = [rows[name] for name in ("sample", "file", "truth", "predicted", "probabilities")]
    for row in zip(*columns, strict=True):
        sample, file, truth, predicted, probabilities = (each.tolist() for each in row)
        shares = [f"{share:.6g}" for share in probabilities]
        names = _BETWEEN.join(compress(classes, predicted))
        theirs = _BETWEEN.join(compress(shares, predicted) if is_of_all else shares if names else [])
        label = [_BETWEEN.join(compress(classes, truth))] if has_labels else []
        words = [*([] if path is None else [str(path(file))]), *label, names]
        writer.writerow([sample, *map(as_cell, words), theirs, *(shares if is_of_all else [])])
    return text.getvalue()


_FORMATS: dict[str, Callable[[Rows, Dataset, Sequence[str]], str]] = {
    ".csv": class_table,
    ".jsonl": class_lines,
    ".json": coco_results,
}
_POSE_FORMATS: dict[str, Callable[[Rows, Dataset, Sequence[str]], str]] = {".csv": pose_table, ".json": coco_poses}
