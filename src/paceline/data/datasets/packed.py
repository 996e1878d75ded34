"""Samples of a pack, read from memory that all processes of a machine share."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.mapped_arrays import DamagedFileError, MappedArrays
from paceline.core.records import read_record, record_fields
from paceline.core.registry import register
from paceline.data.batch import RAGGED, KeypointNames, Sample
from paceline.data.pack import PACK_VERSION
from paceline.data.skip_list import Skipped

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest

_WRITE_AGAIN = "write it again with `paceline data RECIPE --pack`"
_VIEWS = ("image", "mask")  # what transforms and stacking copy anyway; anything else is small, and is copied here


@register.dataset("packed")
def packed(file: Path) -> PackedSamples:
    """The samples of a pack; where all have the same shapes, whole batches of them can be had at once."""
    samples = PackedSamples(Path(file))
    if not samples.facts["even"] or RAGGED.intersection(samples.facts["fields"]):
        return samples
    with suppress(DataError):  # of a damaged first sample, which is to be named when it is read
        even = EvenSamples(samples.file)
        return even if len(even.gather(torch.zeros(1, dtype=torch.int64))["image"].shape) == 4 else samples
    return samples


class PackedSamples:
    """The samples of a pack, by their number in it; images and masks are views that must not be written to.

    The checksum of a sample is compared when it is first read: a damaged one is a DataError.
    """

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        try:
            arrays = MappedArrays(self.file)
            arrays.verify(skip=["record"])
            self.facts = arrays.facts
            if self.facts.get("pack") != PACK_VERSION:
                raise DamagedFileError(f"holds no pack of version {PACK_VERSION}")
        except FileNotFoundError as error:
            raise DataError(f"{file}: no such file; make it with `paceline data RECIPE --pack {file}`") from error
        except (OSError, DamagedFileError) as error:
            why = getattr(error, "strerror", None) or str(error).removeprefix(f"{file}: ")
            raise DataError(f"{file}: not a pack, or damaged ({why}); {_WRITE_AGAIN}") from error
        self._records, self._checksums = arrays.rows("record"), arrays["checksum"]
        self._memory = self._records.values
        self._checked = np.zeros(len(self._records), np.bool_)
        self.classes: list[str] = self.facts["classes"]
        self.channels: int = self.facts["channels"]
        self.skipped = [Skipped(*each) for each in self.facts["skipped"]]
        self.notes = [f"left out when the pack was written: {each}" for each in self.skipped]
        if self.facts["keypoint_names"] is not None:
            names, pairs, limbs = self.facts["keypoint_names"]
            self.joints = KeypointNames(names, [(a, b) for a, b in pairs], [(a, b) for a, b in limbs])

    def __reduce__(self) -> tuple[type[PackedSamples], tuple[Path]]:
        return type(self), (self.file,)  # a worker maps the file itself, and shares its pages

    def __len__(self) -> int:
        return len(self._records)

    def path(self, index: int) -> Path:
        """The pack, which holds all samples."""
        return self.file

    def update_digest(self, digest: DataDigest) -> None:
        """Add the checksums of all samples to a fingerprint."""
        digest.array("samples", self._checksums)

    def read(self, index: int) -> Sample:
        """Sample `index` as it was packed."""
        if not self._checked[index]:
            self._check(index)
        sample = read_record(self._memory, self._records.span(index)[0])
        for name, value in sample.items():
            if isinstance(value, np.ndarray) and name not in _VIEWS:
                sample[name] = value.copy()
        return sample

    def _check(self, index: int) -> None:
        if zlib.crc32(self._records[index].data) != int(self._checksums[index]):
            raise DataError(f"{self.file}: sample {index} is damaged (its checksum is wrong); {_WRITE_AGAIN}")
        self._checked[index] = True


class EvenSamples(PackedSamples):
    """Samples that all have the same shapes, so that a batch is taken without any work in Python for each of them."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._check(0)  # what it says of its shapes holds for all
        self._columns: dict[str, NDArray[Any]] = {}
        for name, dtype, shape, start, _ in record_fields(self._memory, 0):
            strides = (len(self._memory) // len(self), *np.empty(shape or (), dtype).strides)
            self._columns[name] = np.ndarray((len(self), *(shape or ())), dtype, self._memory, start, strides)

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """The samples `ids` (int64 [N]) together: "image" [N, C, H, W] and the fields, copied."""
        numbers = ids.numpy()
        for index in numbers[~self._checked[numbers]].tolist():
            self._check(index)
        return {
            name: torch.from_numpy(_planar(column, numbers) if name == "image" else column[numbers])
            for name, column in self._columns.items()
        }


def _planar(images: NDArray[Any], numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Some of images [N, H, W, C] as [n, C, H, W]."""
    _, height, width, channels = images.shape
    planes = np.empty((len(numbers), channels, height, width), images.dtype)
    for plane, number in zip(planes, numbers.tolist(), strict=True):
        cv2.split(images[number], list(plane))
    return planes
