"""Predictions as files, by sample: maps as PNG files at the size of the truth, classes as the rows of a table."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import UsageError
from paceline.core.mesh import Mesh
from paceline.core.palette import Colour
from paceline.data.batch import Batch
from paceline.data.loading.source import Dataset
from paceline.engine.prediction_table import PredictionTable, PredictsClasses
from paceline.engine.run import Run
from paceline.metrics.state import Metric, State

Map = NDArray[np.uint8]

_ASIDE = re.compile(r"\.[0-9a-f]{16}\.partial")


@runtime_checkable
class PredictsMaps(Protocol):
    """A task whose predictions can be looked at one by one."""

    palette: Sequence[Colour] | None
    """The colours of the numbers in maps; None: they are shades of grey."""

    def maps(self, predictions: Any) -> list[Map]:
        """What is saved of each sample, uint8 [H, W]."""
        ...


class Keeper(Protocol):
    """Keeps the predictions of one evaluation; all processes have one. What cannot be written is a UsageError."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """What is to be measured of each batch for it."""
        ...

    def save(self, batch: Batch, predictions: Any) -> None:
        """Take the predictions of a batch, in any order."""
        ...

    def finish(self, states: Sequence[State], left_out: Sequence[int]) -> None:
        """The first process does this when all have taken all batches.

        `states` are those of its metrics, `left_out` the samples that cannot be read.
        """
        ...


class NoPredictions:
    """Keeps nothing."""

    metrics: Sequence[Metric] = ()

    def save(self, batch: Batch, predictions: Any) -> None:
        """Nothing."""

    def finish(self, states: Sequence[State], left_out: Sequence[int]) -> str | None:
        """Nothing goes wrong."""
        return None


class Keeping:
    """Has a keeper do its work; what goes wrong with files is no reason to end an evaluation, and told at its end."""

    def __init__(self, keeper: Keeper, mesh: Mesh) -> None:
        self.metrics = keeper.metrics
        self._keeper, self._mesh = keeper, mesh
        self._problem: str | None = None

    def save(self, batch: Batch, predictions: Any) -> None:
        """Have the predictions of a batch kept, unless that has failed before."""
        if self._problem is None:
            self._try(lambda: self._keeper.save(batch, predictions))

    def finish(self, states: Sequence[State], left_out: Sequence[int]) -> str | None:
        """Complete what is kept, and return what went wrong in any of the processes."""
        self._agree()  # all have written
        if self._mesh.is_main and self._problem is None:
            self._try(lambda: self._keeper.finish(states, left_out))
        return self._agree()  # none begins to write again before

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except UsageError as error:
            self._problem = str(error)

    def _agree(self) -> str | None:
        own = (self._problem or "").encode(errors="surrogateescape")
        told = self._mesh.gather(torch.tensor(list(own), dtype=torch.uint8))
        found = (bytes(each.tolist()).decode(errors="surrogateescape") for each in told)
        self._problem = next(filter(None, found), None)
        return self._problem


def make_keeper(run: Run, split: str) -> Keeping | NoPredictions:
    """What keeps the predictions of a split in the run directory, if they are wanted."""
    if not run.save_predictions:
        return NoPredictions()
    place, dataset = predictions_place(run, split), run.evaluations[split].source.dataset
    if isinstance(run.task, PredictsMaps):
        return Keeping(PredictionFolder(place, dataset, run.task), run.mesh)
    assert isinstance(run.task, PredictsClasses), "a run is not built with predictions that cannot be saved"
    return Keeping(PredictionTable(place, dataset, run.task), run.mesh)


def predictions_place(run: Run, split: str) -> Path:
    """The folder of a split's predictions, or their file."""
    folder = run.out / "predictions"
    return folder / split if isinstance(run.task, PredictsMaps) else folder / f"{split}.csv"


def can_save(task: object) -> bool:
    """Whether there is a way to save what a task predicts."""
    return isinstance(task, PredictsMaps | PredictsClasses)


class PredictionFolder:
    """Writes the predictions of a split into a folder; each process those that it made, in any order."""

    metrics: Sequence[Metric] = ()

    def __init__(self, folder: Path, dataset: Dataset, task: PredictsMaps) -> None:
        self.folder = folder
        self._task = task
        self._names = file_names(dataset)

    def save(self, batch: Batch, predictions: Any) -> None:
        """Write the predictions of a batch; a file of that name is replaced whole, never seen half-written."""
        for index, found in zip(batch.ids.tolist(), self._task.maps(predictions), strict=True):
            _write(found, self._task.palette, self.folder / self._names[index])

    def finish(self, states: Sequence[State], left_out: Sequence[int]) -> None:
        """Leave no prediction there but those of this evaluation, unless the folder is a link and others may use it."""
        if self.folder.is_symlink() or self.folder.parent.is_symlink():
            return
        skipped = set(left_out)
        _remove_others(self.folder, {name for index, name in enumerate(self._names) if index not in skipped})


def file_names(dataset: Dataset) -> list[str]:
    """A name ending in .png for each sample: that of its file below the folder that all files share.

    Where files differ in their endings alone, names keep those; without files, they are numbers.
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


def _write(found: Map, palette: Sequence[Colour] | None, path: Path) -> None:
    from PIL import Image

    image = Image.fromarray(found)
    if palette is not None:
        image.putpalette([value for colour in palette for value in colour])
    # Two processes may write the same sample, if one of them only keeps step with the other.
    aside = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(aside, format="PNG")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
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
    return file.endswith(".png") or _ASIDE.fullmatch(file) is not None
