"""What tasks predict as rows of all samples, and those as CSV and COCO's result files."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import UsageError
from paceline.core.text import as_cell
from paceline.data.batch import Batch
from paceline.data.split_loader import Dataset
from paceline.metrics.instances import read_runs
from paceline.metrics.metric import MetricValues, State

Rows = Mapping[str, Tensor]
"""What a metric has collected of all samples."""
Formatter = Callable[[Rows, Dataset, Sequence[str]], str]
"""The text of a file of rows; the names are those of the classes or keypoints."""
_BETWEEN = "|"  # of several classes of one sample


def outputs_of(task: object, predictions: Any, size: int) -> dict[str, Tensor]:
    """The predictions of a batch by name, each with a row a sample; a tensor alone is called "output"."""
    fields = getattr(predictions, "_asdict", None)
    named = predictions if isinstance(predictions, Mapping) else fields() if fields else {"output": predictions}
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != size:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            where = "" if name == "output" else f" as {name!r}"
            raise UsageError(
                f"task {type(task).__name__}: predict gave {found}{where}, which cannot be saved; return a tensor with"
                f" one row for each of the {size} samples, or a dict of such tensors"
            )
    return {str(name): value for name, value in named.items()}


def output_arrays(task: object, predictions: Any, size: int) -> list[dict[str, NDArray[Any]]]:
    """The predictions of each sample of a batch, by name."""
    arrays = {name: _array(value) for name, value in outputs_of(task, predictions, size).items()}
    return [{name: value[index] for name, value in arrays.items()} for index in range(size)]


def _array(value: Tensor) -> NDArray[Any]:
    host = value.detach().cpu()
    return np.asarray(host.float() if host.is_floating_point() else host)


class OutputRows:
    """The numbers predicted for each sample: "sample" [N], and each output [N] or [N, D] by its name."""

    higher_is_better: Mapping[str, bool] = {}

    def __init__(self, task: object) -> None:
        self._task = task

    def update(self, predictions: Any, batch: Batch) -> State:
        """The rows of one batch; nothing of outputs with more dimensions."""
        outputs = outputs_of(self._task, predictions, batch.size)
        rows = {f"output {name}": value.detach().cpu().double() for name, value in outputs.items() if value.ndim <= 2}
        return {"sample": batch.ids.cpu().double(), **rows} if rows else {}

    def compute(self, state: State) -> MetricValues:
        return {name.removeprefix("output "): value for name, value in state.items()}


def output_table(rows: Rows, dataset: Dataset, names: Sequence[str]) -> str:
    """Outputs as a CSV file: a row a sample, with a column for each number."""
    outputs = {name: value for name, value in rows.items() if name != "sample"}
    columns = [
        name if value.ndim == 1 else f"{name}_{number}"
        for name, value in outputs.items()
        for number in range(1 if value.ndim == 1 else value.shape[1])
    ]
    written = [["sample", *_path_column(dataset), *map(as_cell, columns)]]
    for index, sample in enumerate(rows["sample"].long().tolist()):
        numbers = [f"{number:.7g}" for value in outputs.values() for number in value[index].reshape(-1).tolist()]
        written.append([sample, *_path_cell(dataset, sample), *numbers])
    return _csv(written)


def coco_boxes(rows: Rows, dataset: Dataset, classes: Sequence[str]) -> str:
    """Detections as COCO's result files have them, and the name of each image's file."""
    return _json_array(_box_results(rows, dataset))


def coco_instances(rows: Rows, dataset: Dataset, classes: Sequence[str]) -> str:
    """The same with the mask of each detection, as run lengths."""
    results = _box_results(rows, dataset)
    for result, mask in zip(results, read_runs(rows, "detection", rows["detections"]), strict=True):
        result["segmentation"] = {"size": mask["size"], "counts": mask["counts"].decode("ascii")}
    return _json_array(results)


def _box_results(rows: Rows, dataset: Dataset) -> list[dict[str, Any]]:
    category_ids = getattr(dataset, "category_ids", None)
    results = []
    for sample, image, label, score, left, top, right, bottom in rows["detections"].tolist():
        category = category_ids[int(label)] if category_ids else int(label) + 1
        box = [round(value, 3) for value in (left, top, right - left, bottom - top)]
        result = {"image_id": int(image), "category_id": category, "bbox": box, "score": round(score, 6)}
        results.append(result | _path(dataset, sample, "file_name"))
    return results


def coco_keypoints(rows: Rows, dataset: Dataset, names: Sequence[str]) -> str:
    """Keypoints as COCO's result files have them, and the name of each image's file.

    COCO numbers pixels, whose middles lie half a pixel further.
    """
    category_ids = getattr(dataset, "category_ids", None)
    category = category_ids[0] if category_ids else 1
    results = []
    for sample, image, score, *places in rows["poses"].tolist():
        triples = zip(places[0::3], places[1::3], places[2::3], strict=True)
        keypoints = [value for x, y, own in triples for value in (round(x - 0.5, 3), round(y - 0.5, 3), round(own, 6))]
        result = {"image_id": int(image), "category_id": category, "keypoints": keypoints, "score": round(score, 6)}
        results.append(result | _path(dataset, sample, "file_name"))
    return _json_array(results)


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
    is_of_all = rows["probabilities"].shape[1] == len(classes)
    each = classes if is_of_all else []
    has_labels = getattr(dataset, "has_labels", True)
    labels = ["label"] if has_labels else []
    written = [["sample", *_path_column(dataset), *labels, "predicted", "probability", *map(as_cell, each)]]
    columns = [rows[name].tolist() for name in ("sample", "file", "truth", "predicted", "probabilities")]
    for sample, file, truth, predicted, probabilities in zip(*columns, strict=True):
        shares = [f"{share:.6g}" for share in probabilities]
        names = _BETWEEN.join(compress(classes, predicted))
        theirs = _BETWEEN.join(compress(shares, predicted) if is_of_all else shares if names else [])
        label = [_BETWEEN.join(compress(classes, truth))] if has_labels else []
        words = [*_path_cell(dataset, file), *map(as_cell, [*label, names])]
        written.append([sample, *words, theirs, *(shares if is_of_all else [])])
    return _csv(written)


def _path(dataset: Dataset, sample: float, key: str) -> dict[str, str]:
    """The file of a sample by a key; nothing where samples are no files."""
    path = getattr(dataset, "path", None)
    return {} if path is None else {key: os.fspath(path(int(sample)))}


def _path_column(dataset: Dataset) -> list[str]:
    return [] if getattr(dataset, "path", None) is None else ["path"]


def _path_cell(dataset: Dataset, sample: float) -> list[str]:
    return [as_cell(file) for file in _path(dataset, sample, "path").values()]


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _json_array(results: Iterable[Any]) -> str:
    return "[" + ",\n ".join(map(json.dumps, results)) + "]\n"
