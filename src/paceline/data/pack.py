"""Packs: all samples of a data set in one file, resized, so that training decodes nothing.

A pack is a file of mapped arrays. A record is a sample's fields one behind the other, each at a multiple of 64 bytes;
beside the records are the shapes in them, and a checksum of each. All processes of a machine share its memory.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.atomic_write import sync_folder
from paceline.core.errors import DataError
from paceline.core.file_lock import lock_file
from paceline.core.process import num_cores
from paceline.core.registry import register
from paceline.data.batch import RAGGED, KeypointNames, Sample
from paceline.data.loader import map_in_order
from paceline.data.mapped_arrays import ArrayWriter, DamagedFileError, MappedArrays, Streamed
from paceline.data.skip_list import UNREADABLE, Skipped, as_skipped
from paceline.data.split_loader import Dataset, TransformPipeline
from paceline.data.transforms.functional import size_of
from paceline.data.transforms.geometric import Resize

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest

_WRITE_AGAIN = "write it again with `paceline data RECIPE --pack`"
_VIEWS = ("image", "mask")  # what transforms and stacking copy anyway; anything else is small, and is copied here


@register.dataset("packed")
def packed(file: Path) -> PackedSamples:
    """The samples of a pack; where all have the same shapes, whole batches of them can be had at once."""
    samples = PackedSamples(Path(file))
    return EvenSamples(samples.file) if samples.is_even else samples


class Field(NamedTuple):
    """A field of every sample: its type, and its number of dimensions, or None if it is a number."""

    name: str
    dtype: str
    dimensions: int | None

    def __str__(self) -> str:
        return f"{self.dtype} in {self.dimensions} dimensions" if self.dimensions else self.dtype


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
        self.fields = [Field(*each) for each in self.facts["fields"]]
        self._records, self._checksums = arrays.rows("record"), arrays["checksum"]
        self._shapes = arrays["shape"].reshape(len(self._records), -1)
        self._checked = np.zeros(len(self._records), np.bool_)
        self.classes: list[str] = self.facts["classes"]
        self.channels: int = self.facts["channels"]
        self.skipped = [Skipped(*each) for each in self.facts["skipped"]]
        self.notes = [f"left out when the pack was written: {each}" for each in self.skipped]
        names = self.facts["keypoint_names"]
        self.joints = None if names is None else KeypointNames.from_json(names)

    def __reduce__(self) -> tuple[type[PackedSamples], tuple[Path]]:
        return type(self), (self.file,)  # a worker maps the file itself, and shares its pages

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_even(self) -> bool:
        """Whether all samples have the same shapes, and an image that is no clip."""
        dimensions = {each.name: each.dimensions for each in self.fields}
        is_plain = dimensions.get("image") == 3 and RAGGED.isdisjoint(dimensions)
        return is_plain and bool((self._shapes == self._shapes[0]).all())

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
        sample: Sample = {}
        for field, array in self._arrays(index):
            is_view = field.name in _VIEWS and field.dimensions is not None
            sample[field.name] = array if is_view else array.item() if field.dimensions is None else array.copy()
        return sample

    def _arrays(self, index: int) -> Iterator[tuple[Field, NDArray[Any]]]:
        """The fields of a sample; they are the memory itself."""
        start, sizes = self._records.span(index)[0], iter(self._shapes[index].tolist())
        for field in self.fields:
            shape = tuple(islice(sizes, field.dimensions or 0))
            array: NDArray[Any] = np.ndarray(shape, field.dtype, self._records.values, start)
            yield field, array
            start += _aligned(array.nbytes)

    def _check(self, index: int) -> None:
        if zlib.crc32(self._records[index].data) != int(self._checksums[index]):
            raise DataError(f"{self.file}: sample {index} is damaged (its checksum is wrong); {_WRITE_AGAIN}")
        self._checked[index] = True


class EvenSamples(PackedSamples):
    """Samples that all have the same shapes, so that a batch is taken without any work in Python for each of them."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        first, memory = self._records[0], self._records.values
        self._columns: dict[str, NDArray[Any]] = {}
        for field, array in self._arrays(0):
            start = array.ctypes.data - first.ctypes.data
            shape, strides = (len(self), *array.shape), (len(first), *array.strides)
            self._columns[field.name] = np.ndarray(shape, array.dtype, memory, start, strides)

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


PACK_VERSION = 4
PackSize = int | Sequence[int] | None
"""What images are resized to: their shorter side (smaller ones stay), a height and width, or nothing."""
ReportProgress = Callable[[int, int], None]
"""Is given how many samples are done, and of how many."""

_ALIGNMENT = 64
_AHEAD = 4  # samples a thread that may wait for being written


class WrittenPack(NamedTuple):
    """A finished pack."""

    path: Path
    samples: int
    bytes: int
    skipped: list[Skipped]


def write_pack(
    dataset: Dataset,
    path: Path,
    size: PackSize,
    progress: ReportProgress | None = None,
    max_skipped: int = 0,
    threads: int | None = None,
) -> WrittenPack:
    """Write all samples into one file, which is there whole or not at all; the bytes do not depend on `threads`.

    More than `max_skipped` samples that cannot be read are a DataError; fewer are left out and listed in the pack.
    """
    path = Path(path)
    size = size if size is None or isinstance(size, int) else list(size)
    threads = threads or num_cores()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _written_aside(path) as file:
            return _write(dataset, path, file, size, progress, max_skipped, threads)
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or error
        raise DataError(f"{path}: the pack cannot be written ({why}); nothing is left of it") from error


@contextmanager
def _written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when all is written; what a killed process left of one is written over."""
    aside = path.with_name(f".{path.name}.part")
    try:
        descriptor = lock_file(aside, patience=0)
    except BlockingIOError as error:
        raise DataError(f"{path}: another process is writing this pack just now") from error
    with os.fdopen(descriptor, "r+b", buffering=1 << 20) as file:
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _write(
    dataset: Dataset,
    path: Path,
    file: BinaryIO,
    size: int | list[int] | None,
    progress: ReportProgress | None,
    max_skipped: int,
    threads: int,
) -> WrittenPack:
    pipeline = TransformPipeline(dataset, [] if size is None else [_Shrink(size)], seed=0)
    records = Streamed("record", file)
    fields: list[Field] | None = None
    ends, checksums, shapes = list[int](), list[int](), list[tuple[int, ...]]()
    skipped: list[Skipped] = []

    def read(index: int) -> Sample | Skipped:
        try:
            return pipeline.sample(0, index, np.empty(0))
        except UNREADABLE as error:
            return as_skipped(dataset, index, error)

    for done, sample in enumerate(map_in_order(read, range(len(dataset)), threads, _AHEAD * threads), 1):
        if isinstance(sample, Skipped):
            skipped.append(sample)
            _check_skipped(path, skipped, max_skipped)
        else:
            fields = _checked_fields(fields, len(ends), sample)
            arrays = [np.asarray(sample[name], dtype) for name, dtype, _ in fields]
            record = b"".join(array.tobytes().ljust(_aligned(array.nbytes), b"\0") for array in arrays)
            records.append(record)
            ends.append(records.size)
            checksums.append(zlib.crc32(record))
            shapes.append(tuple(length for array in arrays for length in array.shape))
        if progress is not None:
            progress(done, len(dataset))
    if not ends:
        why = f"; the first one: {skipped[0]}" if skipped else ""
        raise DataError(f"{path}: there is no sample that could be packed{why}")
    writer = ArrayWriter()
    writer.append("record.ends", np.array(ends))
    writer.append("checksum", np.array(checksums))
    writer.append("shape", np.array(shapes, np.int64))
    writer.facts |= {
        "pack": PACK_VERSION,
        "classes": list(dataset.classes),
        "channels": dataset.channels,
        "keypoint_names": getattr(dataset, "joints", None),
        "size": size,
        "fields": fields,
        "skipped": skipped,
    }
    writer.write(file, records)
    return WrittenPack(path, len(ends), file.tell(), skipped)


def _check_skipped(path: Path, skipped: list[Skipped], most: int) -> None:
    if len(skipped) > most:
        raise DataError(
            f"{path}: not written, as {len(skipped)} samples cannot be read and {most} may be left out; the last is"
            f" {skipped[-1]}. Repair or remove it, or allow it with data.on_error: skip and data.max_skipped"
        )


def _checked_fields(first: list[Field] | None, number: int, sample: Sample) -> list[Field]:
    """The fields of a sample, which must be those of the first one."""
    fields = []
    for name, value in sample.items():
        array = np.asarray(value)
        if array.dtype.kind not in "buif":
            raise DataError(f"a pack holds numbers and arrays of them, but {name!r} of sample {number} is {value!r}")
        if array.ndim or isinstance(value, np.ndarray):
            fields.append(Field(name, array.dtype.name, array.ndim))
        else:
            fields.append(Field(name, np.asarray(array.item()).dtype.name, None))
    if first is None:
        return fields
    found, expected = ({field.name: field for field in each} for each in (fields, first))
    for name in expected | found:
        if found.get(name) != expected.get(name):
            is_, was = (each.get(name, "missing") for each in (found, expected))
            raise DataError(f"{name!r} of sample {number} is {is_}, but of the first one {was}")
    return first


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class _Shrink:
    """Resize to the size of a pack; what is smaller than a shorter side would only grow, and stays as it is."""

    size: int | list[int]
    draws: ClassVar[int] = 0
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        is_small = isinstance(self.size, int) and min(size_of(sample)) <= self.size
        return sample if is_small else Resize(self.size)(sample, draws)
