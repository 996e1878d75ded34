"""Samples of a pack, read from memory that all processes of a machine share."""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import open_regular
from paceline.data.batch import RAGGED, KeypointNames, Sample
from paceline.data.pack_format import (
    MAGIC,
    MAX_HEADER_BYTES,
    PREAMBLE,
    Header,
    checksum,
    number_of,
    record_bytes,
    records_begin,
    shape_of,
)
from paceline.data.skip_list import Skipped

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest

_MADE_AGAIN = "write it again with `paceline data RECIPE --pack`"
_VIEWS = ("image", "mask")  # what transforms and stacking copy anyway; anything else is small, and is copied here


@register.dataset("packed")
def packed(file: Path) -> PackedSamples:
    """The samples of a pack; where all have the same shapes, whole batches of them can be had at once."""
    samples = PackedSamples(Path(file))
    is_even = samples.header.even and not RAGGED.intersection(samples.header.arrays)
    if is_even and samples.header.arrays["image"].dims == 3:
        with suppress(DataError):  # of a damaged first sample, which is to be named when it is read
            return EvenSamples(samples.file)
    return samples


class PackedSamples:
    """The samples of a pack, by their number in it; images and masks are views that must not be written to.

    The checksum of a sample is compared when it is first read: a damaged one is a DataError.
    """

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        self._map = _mapped(self.file)
        length, self.header = _read_header(self.file, self._map)
        row_type = self.header.row_type()
        self._first = records_begin(length, self.header.room, row_type.itemsize)
        self._index_end = PREAMBLE.size + length + self.header.samples * row_type.itemsize
        self._rows: NDArray[Any] = _read_rows(self.file, self._map, length, self.header)
        self._refuse_truncated()
        self._checked = np.zeros(self.header.samples, np.bool_)
        self.left_out = _read_left_out(self.file, self._map, self.header)
        self.classes = self.header.classes
        self.channels = self.header.channels
        self.notes = [f"left out when the pack was written: {each}" for each in self.left_out]
        if self.header.joints is not None:
            names, pairs, limbs = self.header.joints.names, self.header.joints.pairs, self.header.joints.limbs
            self.joints = KeypointNames(names, [(a, b) for a, b in pairs], [(a, b) for a, b in limbs])

    def __reduce__(self) -> tuple[type[PackedSamples], tuple[Path]]:
        return type(self), (self.file,)  # a worker maps the file itself, and shares its pages

    def __len__(self) -> int:
        return self.header.samples

    def path(self, index: int) -> Path:
        """The pack, which holds all samples."""
        return self.file

    def update_digest(self, digest: DataDigest) -> None:
        """Add the checksums of all samples to a fingerprint."""
        digest.array("samples", self._rows["crc"])

    def read(self, index: int) -> Sample:
        """Sample `index` as it was packed."""
        if not self._checked[index]:
            self._check(index)
        row = self._rows[index]
        shapes = {name: tuple(row[shape_of(name)].tolist()) for name in self.header.arrays}
        places, _ = record_bytes(self.header.arrays, shapes)
        begin = int(row["begin"])
        sample: Sample = {}
        for name, field in self.header.arrays.items():
            view = np.ndarray(shapes[name], field.dtype, self._map, begin + places[name])
            sample[name] = view if name in _VIEWS else view.copy()
        for name in self.header.numbers:
            sample[name] = row[number_of(name)].item()
        return sample

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Skipped]:
        """Compare all checksums; what is damaged, sample by sample."""
        damaged = []
        if np.frombuffer(self._map, np.uint8)[self._index_end : self._first].any():
            damaged.append(Skipped(len(self), str(self.file), "the index goes on behind the last sample"))
        for index in range(len(self)):
            try:
                self._check(index)
            except DataError as error:
                damaged.append(Skipped(index, str(self.file), str(error).removeprefix(f"{self.file}: ")))
            if progress is not None:
                progress(index + 1, len(self))
        return damaged

    def _check(self, index: int) -> None:
        row = self._rows[index : index + 1]
        begin, length = self._place(row[0])
        is_inside = self._first <= begin and begin + length <= self.header.records_end
        found = checksum(index, row, memoryview(self._map)[begin : begin + length]) if is_inside else None
        if found != int(row[0]["crc"]):
            raise DataError(f"{self.file}: sample {index} is damaged (its checksum is wrong); {_MADE_AGAIN}")
        self._checked[index] = True

    def _place(self, row: Any) -> tuple[int, int]:
        """Where the record of a row begins, and its length."""
        shapes = {name: tuple(row[shape_of(name)].tolist()) for name in self.header.arrays}
        return int(row["begin"]), record_bytes(self.header.arrays, shapes)[1]

    def _refuse_truncated(self) -> None:
        expected, found = self.header.records_end + self.header.left_out_bytes, len(self._map)
        if found < expected:
            ends = np.append(self._rows["begin"][1:], np.uint64(self.header.records_end))
            cut = np.flatnonzero(ends > found)
            where = f"it ends within sample {cut[0]} of {len(self)}" if len(cut) else "it ends behind the last sample"
            raise DataError(f"{self.file}: truncated to {found:,} of {expected:,} bytes: {where}; {_MADE_AGAIN}")
        if found > expected:
            raise DataError(f"{self.file}: {found:,} bytes, but its header says {expected:,}; {_MADE_AGAIN}")


class EvenSamples(PackedSamples):
    """Samples that all have the same shapes, so that a batch is taken without any work in Python for each of them."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        super()._check(0)  # what it says of its shapes holds for all
        row = self._rows[0]
        shapes = {name: tuple(row[shape_of(name)].tolist()) for name in self.header.arrays}
        places, length = record_bytes(self.header.arrays, shapes)
        if self._first + len(self) * length != self.header.records_end:
            raise DataError(f"{self.file}: its samples are not of one length; {_MADE_AGAIN}")
        self._columns = {
            name: _column(self._map, field.dtype, (len(self), *shapes[name]), self._first + places[name], length)
            for name, field in self.header.arrays.items()
        }

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """The samples `ids` (int64 [N]) together: "image" [N, C, H, W] and the fields, copied."""
        numbers = ids.numpy()
        for index in numbers[~self._checked[numbers]].tolist():
            self._check(index)
        gathered = {name: torch.from_numpy(self._rows[number_of(name)][numbers]) for name in self.header.numbers}
        for name, column in self._columns.items():
            gathered[name] = torch.from_numpy(_planar(column, numbers) if name == "image" else column[numbers])
        return gathered

    def _check(self, index: int) -> None:
        super()._check(index)
        begin, length = self._place(self._rows[index])
        if begin != self._first + index * length or length != self._place(self._rows[0])[1]:
            raise DataError(f"{self.file}: sample {index} is not where it has to be; {_MADE_AGAIN}")


def _column(map_: mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int, stride: int) -> NDArray[Any]:
    """An array of all samples at once, which lie `stride` bytes apart."""
    within = np.empty(shape[1:], dtype).strides
    return np.ndarray(shape, dtype, map_, offset, (stride, *within))


def _planar(images: NDArray[Any], numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Some of images [N, H, W, C] as [n, C, H, W]."""
    _, height, width, channels = images.shape
    planes = np.empty((len(numbers), channels, height, width), images.dtype)
    for plane, number in zip(planes, numbers.tolist(), strict=True):
        cv2.split(images[number], list(plane))
    return planes


def _mapped(file: Path) -> mmap.mmap:
    try:
        with open_regular(file) as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file; make it with `paceline data RECIPE --pack {file}`") from error
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise DataError(f"{file}: not a pack, cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _read_header(file: Path, data: mmap.mmap) -> tuple[int, Header]:
    """The length of the header and what it says."""
    if len(data) < PREAMBLE.size or not data[: len(MAGIC)] == MAGIC:
        raise DataError(f"{file}: not a pack (starts with {data[: len(MAGIC)]!r}); {_MADE_AGAIN}")
    _, length, crc = PREAMBLE.unpack_from(data)
    text = data[PREAMBLE.size : PREAMBLE.size + min(length, MAX_HEADER_BYTES)]
    if zlib.crc32(text) != crc:
        raise DataError(f"{file}: the header is damaged or truncated (its checksum is wrong); {_MADE_AGAIN}")
    try:
        found: Any = json.loads(text)
        if isinstance(found, dict) and found.get("version") != 1:
            raise DataError(f"{file}: a pack of version {found.get('version')!r}, expected 1; {_MADE_AGAIN}")
        header = Header.model_validate(found)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: the header cannot be understood ({error}); {_MADE_AGAIN}") from error
    image = header.arrays.get("image")
    is_image = image is not None and image.dtype in ("uint8", "float32") and image.dims in (3, 4)
    if not is_image or not 0 < header.samples <= header.room:
        raise DataError(f"{file}: the header is not that of a pack of images; {_MADE_AGAIN}")
    return length, header


def _read_rows(file: Path, data: mmap.mmap, length: int, header: Header) -> NDArray[Any]:
    row_type, begin = header.row_type(), PREAMBLE.size + length
    if begin + header.room * row_type.itemsize > len(data):
        raise DataError(f"{file}: truncated to {len(data):,} bytes: it ends within its index; {_MADE_AGAIN}")
    return np.frombuffer(data, row_type, header.samples, begin)


def _read_left_out(file: Path, data: mmap.mmap, header: Header) -> list[Skipped]:
    text = data[header.records_end :]
    try:
        if zlib.crc32(text) != header.left_out_crc:
            raise ValueError("its checksum is wrong")
        return [Skipped(int(each["sample"]), each["path"], str(each["reason"])) for each in json.loads(text)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file}: the list of left-out samples is damaged ({error}); {_MADE_AGAIN}") from error
