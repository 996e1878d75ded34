"""Predictions as PNG files at the size of the truth, one for each sample, named like its image."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UsageError
from paceline.core.palette import Colour
from paceline.data.batch import Batch
from paceline.data.loading.source import Dataset

Map = NDArray[np.uint8]


@runtime_checkable
class PredictsMaps(Protocol):
    """A task whose predictions can be looked at one by one."""

    palette: Sequence[Colour] | None
    """The colours of the numbers in maps; None: they are shades of grey."""

    def maps(self, predictions: Any) -> list[Map]:
        """What is saved of each sample, uint8 [H, W]."""
        ...


class PredictionFolder:
    """Writes the predictions of a split into a folder; each process those that it made, in any order."""

    def __init__(self, folder: Path, dataset: Dataset, task: object) -> None:
        if not isinstance(task, PredictsMaps):
            raise UsageError("evaluate.save_predictions: this task predicts no maps that could be saved; leave it out")
        self.folder = folder
        self._task = task
        self._names = file_names(dataset)

    def save(self, batch: Batch, predictions: Any) -> None:
        """Write the predictions of a batch; a file of that name is replaced whole, never seen half-written."""
        for index, found in zip(batch.ids.tolist(), self._task.maps(predictions), strict=True):
            _write(found, self._task.palette, self.folder / self._names[index])


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
