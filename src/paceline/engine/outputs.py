"""What a task without classes, maps or boxes predicts, as files: numbers as tables, arrays as .npy files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.atomic_write import replace_file
from paceline.core.errors import UsageError
from paceline.core.text import as_cell
from paceline.data.batch import Batch
from paceline.data.split_loader import Dataset
from paceline.metrics.metric import Metric, MetricValues, State


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


class SampleOutputs:
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
        """The rows of all batches."""
        return {name.removeprefix("output "): value for name, value in state.items()}


class OutputFiles:
    """Writes numbers into tables (.csv, .jsonl), arrays of more dimensions into .npy files named like the inputs."""

    def __init__(self, tables: Sequence[Path], folder: Path, dataset: Dataset, names: list[str], task: object) -> None:
        self._tables, self._folder = tables, folder
        self._dataset, self._names, self._task = dataset, names, task
        self._rows = SampleOutputs(task)

    @property
    def metrics(self) -> Sequence[Metric]:
        """What collects the rows of all processes."""
        return [self._rows]

    def save(self, batch: Batch, predictions: Any) -> None:
        """Write the arrays of a batch."""
        for sample, outputs in zip(batch.ids.tolist(), output_arrays(self._task, predictions, batch.size), strict=True):
            for name, value in outputs.items():
                if value.ndim > 1:
                    folder = self._folder if name == "output" else self._folder / name
                    _write(folder / Path(self._names[sample]).with_suffix(".npy"), _npy(value))

    def finish(self, states: Sequence[State], skipped_ids: Sequence[int]) -> None:
        """Write the tables."""
        rows = self._rows.compute(states[0])
        for path in self._tables if rows else ():
            text = _FORMATS[path.suffix](rows, self._dataset)
            _write(path, text.encode(errors="backslashreplace"))


def _npy(value: NDArray[Any]) -> bytes:
    content = io.BytesIO()
    np.save(content, value, allow_pickle=False)
    return content.getvalue()


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, is_durable=False)
    except OSError as error:
        raise UsageError(f"{path}: the prediction cannot be written ({error.strerror or error})") from error


def _csv(rows: Mapping[str, Tensor], dataset: Dataset) -> str:
    """A row a sample, with a column for each number."""
    path = getattr(dataset, "path", None)
    outputs = {name: value for name, value in rows.items() if name != "sample"}
    columns = [
        name if value.ndim == 1 else f"{name}_{number}"
        for name, value in outputs.items()
        for number in range(1 if value.ndim == 1 else value.shape[1])
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", *([] if path is None else ["path"]), *map(as_cell, columns)])
    for index, sample in enumerate(rows["sample"].long().tolist()):
        numbers = [f"{number:.7g}" for value in outputs.values() for number in value[index].reshape(-1).tolist()]
        writer.writerow([sample, *([] if path is None else [as_cell(os.fspath(path(sample)))]), *numbers])
    return text.getvalue()


def _json_lines(rows: Mapping[str, Tensor], dataset: Dataset) -> str:
    """An object a sample, with each output as a number or a list."""
    path = getattr(dataset, "path", None)
    lines = []
    for index, sample in enumerate(rows["sample"].long().tolist()):
        name = {} if path is None else {"path": os.fspath(path(sample))}
        outputs = {key: _plain(value[index].tolist()) for key, value in rows.items() if key != "sample"}
        lines.append(json.dumps({**name, **outputs}) + "\n")
    return "".join(lines)


def _plain(value: Any) -> Any:
    """Seven digits, as float32 has them; JSON has no numbers that are not finite."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return float(f"{value:.7g}") if math.isfinite(value) else None


_FORMATS = {".csv": _csv, ".jsonl": _json_lines}
