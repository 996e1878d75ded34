"""Packs: all samples of a data set in one file, resized, so that training decodes nothing.

A pack is a file of mapped arrays. A record is a sample in the format of safetensors, at a multiple of 64 bytes; beside
the records is a checksum of each. All processes of a machine share its memory.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from paceline.core.atomic_write import sync_folder
from paceline.core.errors import DamagedFileError, DataError
from paceline.core.file_lock import lock_file
from paceline.core.process import num_cores
from paceline.core.registry import register
from paceline.core.threads import map_in_order
from paceline.data.batch import KeypointNames, Sample
from paceline.data.mapped_arrays import MALFORMED, ArrayWriter, MappedArrays, views
from paceline.data.skip_list import UNREADABLE, Skipped, as_skipped
from paceline.data.split_loader import Dataset, TransformPipeline
from paceline.data.transforms.functional import size_of
from paceline.data.transforms.geometric import Resize

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest

_WRITE_AGAIN = "write it again with `paceline data RECIPE --pack`"
_VIEWS = ("image", "mask")  # what transforms and stacking copy anyway; anything else is small, and is copied here


@register.dataset("packed")
class PackedSamples:
    """The samples of a pack, by their number in it; images and masks are views that must not be written to.

    The checksum of a sample is compared when it is first read: a damaged one is a DataError.
    """

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        try:
            arrays = MappedArrays(self.file)
            self.facts = arrays.facts
            if self.facts.get("pack") != PACK_VERSION:
                raise DamagedFileError(f"holds no pack of version {PACK_VERSION}")
        except FileNotFoundError as error:
            raise DataError(f"{file}: no such file; make it with `paceline data RECIPE --pack {file}`") from error
        except (OSError, DamagedFileError) as error:
            why = getattr(error, "strerror", None) or str(error).removeprefix(f"{file}: ")
            raise DataError(f"{file}: not a pack, or damaged ({why}); {_WRITE_AGAIN}") from error
        self._memory, self._ends, self._checksums = arrays.stream, arrays["end"], arrays["checksum"]
        self._checked = np.zeros(len(self._ends), np.bool_)
        self.classes: list[str] = self.facts["classes"]
        self.channels: int = self.facts["channels"]
        self.skipped = [Skipped(*each) for each in self.facts["skipped"]]
        self.notes = [f"left out when the pack was written: {each}" for each in self.skipped]
        names = self.facts["keypoint_names"]
        self.category_ids: list[int] | None = self.facts.get("category_ids")
        self.joints = None if names is None else KeypointNames.from_json(names)

    def __reduce__(self) -> tuple[type[PackedSamples], tuple[Path]]:
        return PackedSamples, (self.file,)  # a worker maps the file itself, and shares its pages

    def __len__(self) -> int:
        return len(self._ends)

    def path(self, index: int) -> Path:
        """The pack, which holds all samples."""
        return self.file

    def update_digest(self, digest: DataDigest) -> None:
        """Add the checksums of all samples to a fingerprint."""
        digest.array("samples", self._checksums)

    def image_sizes(self) -> NDArray[np.int64]:
        """The height and width of each image as it was packed, [N, 2]; 1 of a damaged one, reported when it is read."""
        sizes = np.ones((len(self), 2), np.int64)
        for index, size in enumerate(sizes):
            with suppress(*MALFORMED):
                size[:] = views(self._record(index))["image"].shape[-3:-1]
        return sizes

    def read(self, index: int) -> Sample:
        """Sample `index` as it was packed."""
        record = self._record(index)
        if not self._checked[index]:
            if zlib.crc32(record.data) != int(self._checksums[index]):
                raise DataError(f"{self.file}: sample {index} is damaged (its checksum is wrong); {_WRITE_AGAIN}")
            self._checked[index] = True
        try:
            fields = views(record)
        except MALFORMED as error:
            raise DataError(f"{self.file}: sample {index} is no sample ({error}); {_WRITE_AGAIN}") from error
        return {
            name: array if name in _VIEWS and array.ndim else array.copy() if array.ndim else array.item()
            for name, array in fields.items()
        }

    def _record(self, index: int) -> NDArray[np.uint8]:
        return self._memory[int(self._ends[index - 1]) if index else 0 : int(self._ends[index])]


PACK_VERSION = 5
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
    ends, checksums, skipped = list[int](), list[int](), list[Skipped]()

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
            record = _encode(sample, len(ends))
            file.write(record)
            ends.append(file.tell())
            checksums.append(zlib.crc32(record))
        if progress is not None:
            progress(done, len(dataset))
    if not ends:
        why = f"; the first one: {skipped[0]}" if skipped else ""
        raise DataError(f"{path}: there is no sample that could be packed{why}")
    writer = ArrayWriter()
    writer.append("end", np.array(ends))
    writer.append("checksum", np.array(checksums))
    writer.facts |= {
        "pack": PACK_VERSION,
        "classes": list(dataset.classes),
        "channels": dataset.channels,
        "keypoint_names": getattr(dataset, "joints", None),
        "category_ids": getattr(dataset, "category_ids", None),
        "size": size,
        "skipped": skipped,
    }
    writer.write(file)
    return WrittenPack(path, len(ends), file.tell(), skipped)


def _check_skipped(path: Path, skipped: list[Skipped], most: int) -> None:
    if len(skipped) > most:
        raise DataError(
            f"{path}: not written, as {len(skipped)} samples cannot be read and {most} may be left out; the last is"
            f" {skipped[-1]}. Repair or remove it, or allow it with data.on_error: skip and data.max_skipped"
        )


def _encode(sample: Sample, number: int) -> bytes:
    arrays = {name: np.asarray(value) for name, value in sample.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "buif":
            found = f"{name!r} of sample {number} is {sample[name]!r}"
            raise DataError(f"a pack holds numbers and arrays of them, but {found}")
    record: bytes = save(arrays)
    return record + bytes(-len(record) % _ALIGNMENT)


@dataclass(frozen=True)
class _Shrink:
    """Resize to the size of a pack; what is smaller than a shorter side would only grow, and stays as it is."""

    size: int | list[int]
    draws: ClassVar[int] = 0
    reads_encoded: ClassVar[bool] = True

    def __call__(self, sample: Sample, draws: NDArray[np.float64]) -> Sample:
        is_small = isinstance(self.size, int) and min(size_of(sample)) <= self.size
        return sample if is_small else Resize(self.size)(sample, draws)
