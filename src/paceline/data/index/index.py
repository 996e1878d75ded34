"""Indexes: what a data set found in its folders, lists and annotations, built once and shared by all processes.

They are kept in the user's cache folder, and never beside the data: other programs take every folder beside images for
a class, and an index that came with the data could name any file of this machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import fsum
from pathlib import Path
from threading import Timer
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.atomic_write import replace_file
from paceline.core.cache_folder import cache_folder
from paceline.core.errors import DamagedFileError, DataError
from paceline.core.file_lock import lock_file
from paceline.core.regular_file import open_regular
from paceline.core.text import join_first
from paceline.data.mapped_arrays import ArrayWriter, MappedArrays
from paceline.data.rng import derive
from paceline.data.sampler import Permutation

_VERSION = 11  # of what data sets write into their indexes
_PATIENCE = 5.0  # seconds until something is said about work that goes on
_TICK = 2_000_000_000  # nanoseconds within which two changes may have one time
_UNREAD = -1  # instead of a checksum
_BLOCK = 1 << 20


class IndexBuilder(ArrayWriter):
    """Takes the arrays and facts of an index, and which files and folders they are made of."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._base = folder
        self._watched: list[tuple[bytes, int, int, int]] = []
        self.facts["notes"] = []

    def note(self, text: str) -> None:
        """Add something odd to the data set's notes."""
        self.facts["notes"].append(os.fsencode(text).decode(errors="replace"))  # names need not be UTF-8

    def watch(self, path: Path, by_content: bool = False) -> None:
        """Have the index built again once this file or folder has changed; call it before you look into it.

        With `by_content`, the whole file is compared whenever the index is opened.
        """
        name = path.relative_to(self._base) if path.is_relative_to(self._base) else path.absolute()
        self._watched.append((os.fsencode(name), *_state(path), _checksum(path) if by_content else _UNREAD))

    def write(self, file: IO[bytes]) -> None:
        """Write the whole file, with what is watched."""
        self.append_texts("watched", [name for name, *_ in self._watched])
        self.append("watched.state", np.array([state for _, *state in self._watched], np.int64).reshape(-1, 3))
        super().write(file)


def open_index(
    folder: Path, kind: str, arguments: Mapping[str, Any], build: Callable[[IndexBuilder], None]
) -> MappedArrays:
    """The index of the data in `folder` that `build` makes for these arguments, or a cached one that is still valid.

    `arguments` are what JSON can hold. One process builds it, and the others wait.
    """
    cache = cache_folder()
    path = cache / f"index-{kind}-{_digest([_VERSION, kind, dict(arguments)])}-{_digest([os.path.realpath(folder)])}"
    try:
        return _find(path, folder) or _build_once(path, folder, build)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror})") from error


def _build_once(path: Path, folder: Path, build: Callable[[IndexBuilder], None]) -> MappedArrays:
    """The index that this process builds, or that another one has built meanwhile."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = lock_file(lock)
    except OSError:  # no locks there, or nothing can be written: several may build it, and write the same bytes
        return _build(path, folder, build)
    try:
        return _find(path, folder) or _build(path, folder, build)
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _find(path: Path, folder: Path) -> MappedArrays | None:
    """The index in a file, if it is whole, and what it was made of has not changed."""
    try:
        index = MappedArrays(path)
        return index if index.facts.get("name") == path.name and _is_valid(index, folder) else None
    except (OSError, DamagedFileError, LookupError, ValueError):
        return None


def _is_valid(index: MappedArrays, folder: Path) -> bool:
    began = index.path.stat().st_mtime_ns
    for name, (size, changed, content) in zip(
        index.rows("watched").texts(), index["watched.state"].tolist(), strict=True
    ):
        path = folder / os.fsdecode(name)
        if _state(path) != (size, changed) or (content != _UNREAD and _checksum(path) != content):
            return False
        if abs(began - changed) <= _TICK:  # a later change may have the same time
            return False
    return True


def _state(path: Path) -> tuple[int, int]:
    """Size, of a file, and time of the last change: what must stay the same."""
    status = path.stat()
    return (-1 if path.is_dir() else status.st_size), status.st_mtime_ns


def _checksum(path: Path) -> int:
    checksum = 0
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _build(path: Path, folder: Path, build: Callable[[IndexBuilder], None]) -> MappedArrays:
    """The index, written to `path`, whose time is that at which building began. What `build` raises is raised."""
    builder, began, content = IndexBuilder(folder), time.time_ns(), io.BytesIO()
    text = f"indexing {folder}; this is done once and kept in {path}"
    timer = Timer(_PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        build(builder)
    finally:
        timer.cancel()
    builder.facts["name"] = path.name
    builder.write(content)
    try:
        replace_file(path, content.getvalue(), is_durable=False)
        os.utime(path, ns=(began, began))
        return MappedArrays(path)
    except OSError as error:
        advice = "make room, or set PACELINE_CACHE to a folder of yours"
        raise DataError(f"{folder}: its index cannot be written to {path} ({error.strerror}); {advice}") from error


Part = range | NDArray[Any]
"""The rows of an index that belong to a split."""

_PURPOSE = 0x5917  # keeps the order that samples are drawn in apart from the one they are trained in
_CHUNK = 1 << 16
_MAX_PARTS = 100  # splits or folds of a list
_MAX_NAMES = 10


def draw_parts(
    size: int, shares: Mapping[str, float], seed: int, labels: NDArray[np.integer[Any]] | None = None
) -> dict[str, NDArray[np.uint32]]:
    """The rows of each split, ascending: disjoint, and together all of them.

    A split has its share of the samples, rounded; given the class of each row, also of each class. The order in which
    `shares` names the splits does not matter.
    """
    names = sorted(shares)
    sums = [fsum(shares[name] for name in names[:number]) for number in range(len(names) + 1)]
    bounds = [round(size * each / sums[-1]) for each in sums]
    order = Permutation(size, derive(seed, _PURPOSE))
    drawn = np.concatenate([order.permute(0, rows) for rows in np.split(np.arange(size), range(_CHUNK, size, _CHUNK))])
    if labels is None:
        parts = zip(names, pairwise(bounds), strict=True)
        return {name: np.sort(drawn[start:stop]).astype(np.uint32) for name, (start, stop) in parts}
    _, firsts, classes, counts = np.unique(labels[drawn], return_index=True, return_inverse=True, return_counts=True)
    ideal = counts[:, None] * (np.array([shares[name] for name in names]) / sums[-1])
    whole = _rounded(ideal, counts, np.diff(bounds), firsts)
    # The first of each class, as they are drawn, belong to the first split, and so on.
    by_class = drawn[np.argsort(classes, kind="stable")]
    part = np.repeat(np.tile(np.arange(len(names)), len(counts)), whole.ravel())
    return {name: np.sort(by_class[part == number]).astype(np.uint32) for number, name in enumerate(names)}


def _rounded(
    ideal: NDArray[np.float64], rows: NDArray[np.int64], columns: NDArray[np.int64], order: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Whole numbers with these sums of rows and columns: what is left goes to the largest remainders, ties by order."""
    whole = np.floor(ideal).astype(np.int64)
    rows, columns = rows - whole.sum(1), columns - whole.sum(0)
    ranks = np.broadcast_to(np.argsort(np.argsort(order))[:, None], ideal.shape)
    places = np.column_stack(np.unravel_index(np.lexsort((ranks.ravel(), (whole - ideal).ravel())), ideal.shape))
    for most in (1, len(columns)):  # at first one more each; further ones only where the sums leave nothing else
        for row, column in places.tolist():
            more = min(most, rows[row], columns[column])
            whole[row, column] += more
            rows[row] -= more
            columns[column] -= more
    return whole


def drawn_part(
    size: int,
    split: str | None,
    shares: Mapping[str, float] | None,
    seed: int,
    labels: NDArray[np.integer[Any]] | None = None,
) -> Part:
    """The rows of a split that `draw_parts` gives; all of them without shares."""
    if not shares or not size:
        return range(size)
    if split is None or split not in shares:
        raise DataError(f"the split {split!r} is none of split_shares, which are {', '.join(shares)}")
    members = draw_parts(size, shares, seed, labels)[split]
    if not len(members):
        raise DataError(f"the split {split} has no samples: its share is {shares[split]:g} of {size:,}; give it more")
    return members


def append_split_words(writer: ArrayWriter, file: Path, words: Sequence[Any]) -> None:
    """Add the words of the next rows in a list's column of splits or folds to an index."""
    names: dict[str, int] = writer.facts.setdefault("listed", {})
    writer.append("listed", np.array([names.setdefault(str(word).strip(), len(names)) for word in words]))
    if len(names) > _MAX_PARTS:
        some = join_first(list(names), _MAX_NAMES)
        found = f"the column of splits or folds has more than {_MAX_PARTS} different words: {some}"
        raise DataError(f"{file}: {found}; name another column")


def read_split_column(index: MappedArrays, file: Path, split: str | None, column: str | int) -> Part:
    """The rows that have a split's name in the column of splits."""
    names: dict[str, int] = index.facts["listed"]
    if split not in names:
        counts = [f"{name} ({count:,})" for name, count in zip(names, np.bincount(index["listed"]), strict=True)]
        found = f"the column {column!r} has {join_first(counts, _MAX_NAMES)}"
        raise DataError(f"{file}: no line is of the split {split!r}; {found}; give one of these as `split`")
    return np.flatnonzero(index["listed"] == names[split])


def read_fold(index: MappedArrays, file: Path, fold: int, is_held_out: bool) -> Part:
    """The rows of a fold, or of all others."""
    names: dict[str, int] = index.facts["listed"]
    if str(fold) not in names:
        found = f"the folds are {join_first(sorted(names), _MAX_NAMES)}"
        raise DataError(f"{file}: no line is in fold {fold}; {found}; give another fold or fold_column")
    rows = np.flatnonzero((index["listed"] == names[str(fold)]) == is_held_out)
    if not len(rows):
        raise DataError(f"{file}: all lines are in fold {fold}, so none are left to train on")
    return rows
