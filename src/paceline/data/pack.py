"""Packs: all samples of a data set in one file, resized, so that training decodes nothing.

A pack is a file of mapped arrays with the samples as records and a checksum of each. All processes of a machine share
its memory.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from paceline.data.mapped_arrays import ArrayWriter, DamagedFileError, MappedArrays
from paceline.data.prefetch import map_in_order
from paceline.data.records import read_record, record_fields, record_pieces
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
        for name, dtype, shape, start in record_fields(self._memory, 0):
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


PACK_VERSION = 3
PackSize = int | Sequence[int] | None
"""What images are resized to: their shorter side (smaller ones stay), a height and width, or nothing."""
ReportProgress = Callable[[int, int], None]
"""Is given how many samples are done, and of how many."""
Layout = dict[str, tuple[str, int]]
"""The type and number of dimensions of each field."""

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
    writer = ArrayWriter(file, streamed="record")
    skipped: list[Skipped] = []
    layout: Layout | None = None
    descriptions: set[bytes] = set()
    count = 0

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
            layout = _checked_layout(layout, count, sample)
            pieces = record_pieces(sample)
            if len(descriptions) < 2:
                descriptions.add(bytes(pieces[0]))
            record = b"".join(pieces)
            writer.append_texts("record", [record])
            writer.append("checksum", np.array([zlib.crc32(record)], np.uint32))
            count += 1
        if progress is not None:
            progress(done, len(dataset))
    if not count:
        why = f"; the first one: {skipped[0]}" if skipped else ""
        raise DataError(f"{path}: there is no sample that could be packed{why}")
    writer.facts |= {
        "pack": PACK_VERSION,
        "classes": list(dataset.classes),
        "channels": dataset.channels,
        "keypoint_names": getattr(dataset, "joints", None),
        "size": size,
        "fields": list(layout or ()),
        "even": len(descriptions) == 1,
        "skipped": skipped,
    }
    writer.finish()
    return WrittenPack(path, count, file.tell(), skipped)


def _check_skipped(path: Path, skipped: list[Skipped], most: int) -> None:
    if len(skipped) > most:
        raise DataError(
            f"{path}: not written, as {len(skipped)} samples cannot be read and {most} may be left out; the last is"
            f" {skipped[-1]}. Repair or remove it, or allow it with data.on_error: skip and data.max_skipped"
        )


def _checked_layout(first: Layout | None, number: int, sample: Sample) -> Layout:
    """The layout of a sample, which must be that of the first one."""
    layout: Layout = {}
    for name, value in sample.items():
        array = np.asarray(value)
        if array.dtype.kind not in "buif":
            raise DataError(f"a pack holds numbers and arrays of them, but {name!r} of sample {number} is {value!r}")
        layout[name] = array.dtype.name if array.ndim else "number", array.ndim
    expected = layout if first is None else first
    for name in {**expected, **layout}:
        if layout.get(name) != expected.get(name):
            found, wanted = (_describe_field(each.get(name)) for each in (layout, expected))
            raise DataError(f"{name!r} of sample {number} is {found}, but of the first one {wanted}")
    return layout


def _describe_field(field: tuple[str, int] | None) -> str:
    return "missing" if field is None else field[0] if not field[1] else f"{field[0]} in {field[1]} dimensions"


@dataclass(frozen=True)
class _Shrink:
    """Resize to the size of a pack; what is smaller than a shorter side would only grow, and stays as it is."""

    size: int | list[int]
    draws: ClassVar[int] = 0
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        is_small = isinstance(self.size, int) and min(size_of(sample)) <= self.size
        return sample if is_small else Resize(self.size)(sample, draws)
