"""Predicted classes as a CSV file: a row for each sample, in the order of the samples."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from paceline.core.disk import replace_file
from paceline.core.errors import UsageError
from paceline.data.batch import Batch
from paceline.data.loading.source import Dataset
from paceline.metrics.state import Metric, State

_BETWEEN = "|"  # of several classes of one sample


@runtime_checkable
class PredictsClasses(Protocol):
    """A task that has a probability of each class for each sample."""

    classes: list[str]

    def answers(self) -> Metric:
        """What collects them: figures are the tensors "sample", "file", "truth", "predicted" and "probabilities".

        "sample" [N] is the number that a row is called by, "file" [N] that of the sample whose file it is; "truth" and
        "predicted" are bool [N, C]; "probabilities" are [N, C], or [N, 1] of what is predicted.
        """
        ...


class PredictionTable:
    """Writes what is predicted for each sample of a split into a file, at the end of its evaluation."""

    def __init__(self, path: Path, dataset: Dataset, task: PredictsClasses) -> None:
        self.path = path
        self._dataset = dataset
        self._classes = task.classes
        self._answers = task.answers()

    @property
    def metrics(self) -> Sequence[Metric]:
        """Probabilities come to the first process in the same way as what figures are made of."""
        return [self._answers]

    def save(self, batch: Batch, predictions: Any) -> None:
        """Nothing: states have it all."""

    def finish(self, states: Sequence[State], left_out: Sequence[int]) -> None:
        """Write the file; an earlier one is replaced whole, never seen half-written."""
        # Names of files may be no UTF-8, and are written as they are.
        content = self._text(self._answers.figures(states[0])).encode("utf-8", "surrogateescape")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, content)
        except OSError as error:
            raise UsageError(f"{self.path}: predictions cannot be written ({error.strerror or error})") from error

    def _text(self, found: dict[str, Tensor]) -> str:
        path = getattr(self._dataset, "path", None)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        paths = [] if path is None else ["path"]
        is_of_all = found["probabilities"].shape[1] == len(self._classes)
        each = self._classes if is_of_all else []
        writer.writerow(["sample", *paths, "label", "predicted", "probability", *each])
        columns = [found[name] for name in ("sample", "file", "truth", "predicted", "probabilities")]
        for row in zip(*columns, strict=True):
            sample, file, truth, predicted, probabilities = (each.tolist() for each in row)
            shares = [f"{share:.6g}" for share in probabilities]
            names = _BETWEEN.join(compress(self._classes, predicted))
            theirs = _BETWEEN.join(compress(shares, predicted) if is_of_all else shares if names else [])
            label = _BETWEEN.join(compress(self._classes, truth))
            place = [] if path is None else [path(file)]
            writer.writerow([sample, *place, label, names, theirs, *(shares if is_of_all else [])])
        return text.getvalue()
