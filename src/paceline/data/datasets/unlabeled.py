"""Images and videos without labels: what `predict` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError, UsageError
from paceline.data.batch import Sample
from paceline.data.io.image import EXTENSIONS as IMAGE_EXTENSIONS
from paceline.data.io.image import Encoded
from paceline.data.io.video import EXTENSIONS as VIDEO_EXTENSIONS
from paceline.data.io.video import EncodedVideo

Placeholder = Callable[[int, int], Sample]
"""The fields that stand for the missing labels of an image of this height and width."""


class UnlabeledFiles:
    """Image files, or videos, by number. `placeholder` fills in what the task's transforms and collation expect."""

    has_labels = False

    def __init__(
        self,
        paths: Sequence[Path],
        classes: Sequence[str],
        channels: int,
        placeholder: Placeholder,
        reads_videos: bool = False,
    ) -> None:
        self.classes = list(classes)
        self.channels = channels
        self.reads_videos = reads_videos
        self._paths = list(paths)
        self._placeholder = placeholder

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> Path:
        """The file of sample `index`."""
        return self._paths[index]

    def open(self, index: int) -> Sample:
        """The image or video, not decoded unless the model takes gray images, and placeholders for its labels."""
        path = self._paths[index]
        if self.reads_videos:
            return {"image": EncodedVideo(path), **self._placeholder(0, 0)}
        image = Encoded.read(path)
        size = {"size": np.array([image.height, image.width])}
        pixels = image if self.channels == 3 else to_channels(image.decode(), self.channels, path)
        return {"image": pixels, **size, **self._placeholder(image.height, image.width)}

    def read(self, index: int) -> Sample:
        """The same with the image decoded."""
        sample = self.open(index)
        return {**sample, "image": sample["image"].decode()} if hasattr(sample["image"], "decode") else sample


class UnlabeledArrays:
    """Images in memory, uint8 [H, W, C], by number."""

    has_labels = False

    def __init__(
        self, images: Sequence[NDArray[np.uint8]], classes: Sequence[str], channels: int, placeholder: Placeholder
    ) -> None:
        self.classes = list(classes)
        self.channels = channels
        self._images = list(images)
        self._placeholder = placeholder

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> Sample:
        """The image and placeholders for its labels."""
        image = np.asarray(self._images[index])
        image = image[:, :, None] if image.ndim == 2 else image
        height, width = image.shape[:2]
        size = {"size": np.array([height, width])}
        return {"image": to_channels(image, self.channels), **size, **self._placeholder(height, width)}


def to_channels(image: NDArray[np.uint8], channels: int, path: Path | None = None) -> NDArray[np.uint8]:
    """The image with as many channels as the model takes: color becomes gray, gray becomes color."""
    given = image.shape[2]
    if given == channels:
        return image
    if (given, channels) == (3, 1):
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None], np.uint8)
    if (given, channels) == (1, 3):
        return np.repeat(image, 3, axis=2)
    where = f"{path}: " if path else ""
    raise DataError(f"{where}the image has {given} channels, the model takes {channels}")


def find_files(inputs: Sequence[Path], videos: bool) -> list[Path]:
    """The files that are named, those of folders at any depth, and those that lists name, each once, in this order.

    A list is a .txt or .csv file with a path in the first column of each line, relative to the list's folder.
    """
    extensions = VIDEO_EXTENSIONS if videos else IMAGE_EXTENSIONS
    found: dict[Path, None] = {}
    for place in inputs:
        if place.is_dir():
            below = sorted(Path(folder) / name for folder, _, names in os.walk(place) for name in names)
            found |= dict.fromkeys(path for path in below if path.suffix.lower() in extensions)
        elif place.suffix.lower() in (".txt", ".csv"):
            found |= dict.fromkeys(_listed(place, extensions))
        elif place.exists():
            found[place] = None
        else:
            raise UsageError(f"{place}: no such file or folder")
    if not found:
        kind = "videos" if videos else "images"
        where = ", ".join(map(str, inputs))
        raise UsageError(f"{where}: no {kind} found; expected files ending in {' '.join(extensions)}")
    return list(found)


def _listed(path: Path, extensions: Sequence[str]) -> list[Path]:
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    cells = [line.split(",")[0].strip().strip('"') for line in lines if line.strip()]
    # The first line may name the columns.
    names = cells[1:] if cells and Path(cells[0]).suffix.lower() not in extensions else cells
    return [path.parent / name for name in names]
