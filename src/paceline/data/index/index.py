"""Indexes of samples: built once, cached, memory-mapped by all processes of a machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.file_lock import is_at, lock_file
from paceline.core.regular_file import open_regular
from paceline.data.index.cache_folder import cache_folders, mark_used, prepare, remove_oldest
from paceline.data.index.index_file import DamagedIndexError, Index, IndexWriter, NoRoomError

__all__ = ["Index", "IndexBuilder", "open_index"]

_PATIENCE = 5.0  # seconds until something is said about work that goes on
_VERSION = 3  # of what data sets write into their indexes
_TICK, _COARSE_TICK = 20_000_000, 2_000_000_000  # nanoseconds within which two changes may have one time
_SECOND = 1_000_000_000
_WATCHED = ("watched.size", "watched.changed", "watched.content")
_UNREAD = -1  # instead of a checksum
_BLOCK = 1 << 20


class IndexBuilder(IndexWriter):
    """Takes the columns of an index, and notes which files and folders they are made of."""

    def __init__(self, home: Path, folder: Path) -> None:
        super().__init__(home)
        self._base = folder
        self._watched: list[tuple[bytes, int, int, int]] = []

    def watch(self, path: Path, by_content: bool = False) -> None:
        """Have the index made anew once this file or folder has changed; to be called before it is looked into.

        With `by_content`, all of the file is read for it whenever the index is opened.
        """
        content = _checksum(path) if by_content else _UNREAD
        name = path.relative_to(self._base) if path.is_relative_to(self._base) else path.absolute()
        self._watched.append((os.fsencode(name), *_state(path), content))

    def finish(self, file: IO[bytes], facts: dict[str, Any]) -> None:
        """Write everything, with what is watched."""
        self.texts("watched", [name for name, *_ in self._watched])
        for place, column in enumerate(_WATCHED, 1):
            self.numbers(column, np.array([each[place] for each in self._watched], np.int64))
        self.save(file, facts)


def open_index(folder: Path, kind: str, arguments: Mapping[str, Any], build: Callable[[IndexBuilder], None]) -> Index:
    """The index of the data in `folder` that `build` makes for these arguments, or a kept one that is still true.

    One process builds while others wait for it. `arguments` are numbers, texts and lists of such.
    """
    asked = time.time_ns()
    place = _digest([os.path.realpath(folder)])
    name = f"index-{kind}-{_digest([_VERSION, kind, dict(arguments)])}-{place}"
    homes = list(cache_folders())
    for home in homes:
        path = home / name
        found = _find(path, folder, asked)
        if found is not None:
            mark_used(path)
            return found
        with suppress(NoRoomError):
            return _make(path, folder, asked, build)
    tried = " nor ".join(map(str, homes))
    raise DataError(
        f"{folder}: there is no place to keep an index of it: neither {tried} can be written to; set PACELINE_CACHE to"
        " a folder of your own"
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _find(path: Path, folder: Path, asked: int) -> Index | None:
    """The index in a file, if it is whole and what it was made of is still the same."""
    try:
        index = Index(path)
        is_own = index.is_ours and index.facts.get("name") == path.name
        return index if is_own and _is_true(index, folder, asked) else None
    except (OSError, DamagedIndexError, LookupError, ValueError):
        return None


def _is_true(index: Index, folder: Path, asked: int) -> bool:
    began = int(index.facts.get("began", 0))
    columns = [index.numbers(column).tolist() for column in _WATCHED]
    for name, size, changed, content in zip(index.texts("watched"), *columns, strict=True):
        path = folder / os.fsdecode(name)
        if _state(path) != (size, changed) or (content != _UNREAD and _checksum(path) != content):
            return False
        # Changed so shortly before it was looked into that a later change may have the same time.
        tick = _COARSE_TICK if changed % _SECOND == 0 else _TICK
        if abs(began - changed) <= tick and began < asked:
            return False
    return True


def _state(path: Path) -> tuple[int, int]:
    """Size, of a file, and time of the last change: what must stay the same."""
    status = path.stat()
    return (-1 if path.is_dir() else status.st_size), status.st_mtime_ns


def _checksum(path: Path) -> int:
    """Of what a file holds."""
    checksum = 0
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _make(path: Path, folder: Path, asked: int, build: Callable[[IndexBuilder], None]) -> Index:
    prepare(path.parent)
    partial = path.with_name(f"{path.name}.partial")
    with _locked(partial, folder) as file:
        found = _find(path, folder, asked)  # by the process that was waited for
        if found is not None:
            return found
        with _telling(f"indexing {folder}; this is done once and kept in {path}"):
            began = time.time_ns()
            builder = IndexBuilder(path.parent, folder)
            build(builder)
            builder.finish(file, {"name": path.name, "began": began})
        try:
            partial.replace(path)
            remove_oldest(path.parent, path)
            return Index(path, check=False)
        except OSError as error:
            raise NoRoomError from error


@contextmanager
def _locked(partial: Path, folder: Path) -> Iterator[IO[bytes]]:
    """The file that an index is written to, ours alone once whoever has it is done; unless renamed it is gone then."""
    try:
        with _telling(f"waiting for another process to index {folder}"):
            file = os.fdopen(lock_file(partial), "r+b")
    except OSError as error:  # no permission, no space, or a file system without locks
        raise NoRoomError from error
    with file:
        try:
            yield file
        finally:
            if is_at(file.fileno(), partial):
                partial.unlink()


@contextmanager
def _telling(text: str) -> Iterator[None]:
    """Say what goes on if it takes long."""
    timer = Timer(_PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


Arrays = dict[str, NDArray[Any]]
Watch = Callable[[Path], None]


def kept_arrays(folder: Path, kind: str, arguments: Mapping[str, Any], make: Callable[[Watch], Arrays]) -> Arrays:
    """What `make` gives for the data in `folder`, from the index of an earlier time if that is still true.

    `make` is given a function that it calls with each file and folder before it looks into it. The arrays may not be
    written to; those of whole numbers may come back in a smaller type.
    """

    def build(builder: IndexBuilder) -> None:
        def watch(path: Path) -> None:
            try:
                builder.watch(path)
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror})") from error

        made = make(watch)
        for name, values in made.items():
            builder.numbers(name, values.ravel())
        builder.texts("arrays", [json.dumps([name, *values.shape]).encode() for name, values in made.items()])

    index = open_index(folder, kind, arguments, build)
    described = [json.loads(text) for text in index.texts("arrays")]
    return {name: index.numbers(name).reshape(shape) for name, *shape in described}


def as_bytes(value: Any) -> NDArray[np.uint8]:
    """Anything that JSON can hold, to be kept as an array."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def from_bytes(values: NDArray[np.uint8]) -> Any:
    """What `as_bytes` was given."""
    return json.loads(values.tobytes())


def joined(parts: Iterable[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Texts in one array, and where each of them ends."""
    listed = list(parts)
    return np.frombuffer(b"".join(listed), np.uint8), np.cumsum([len(part) for part in listed], dtype=np.int64)
