"""Indexes of samples that are made once, kept beside the data, and shared by all processes of a machine.

An index is kept in the hidden folder `.paceline` of the data; where that cannot be written to, in the user's cache
folder. It holds what it was made of, so one that is out of date, damaged or of another version is made anew. That is
told by sizes and times of change, and of lists by a checksum of what is in them as well, since a copy, a link or a
version that is taken out again may have both of another list. Neither the number of a file nor the time its state
changed is looked at: data that is copied as it is, with its index, has other ones, and so may other machines.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import IO, Any

import numpy as np

from paceline.core.errors import DataError
from paceline.data.indexes.index_file import DamagedIndexError, Index
from paceline.data.indexes.index_writer import IndexWriter, NoRoomError

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
    name = f"{kind}-{_digest([_VERSION, kind, dict(arguments)])}"
    for home, stem in _homes(folder, name):
        path = home / f"index-{stem}"
        found = _find(path, folder, asked)
        if found is not None:
            return found
        with suppress(NoRoomError):
            return _make(path, folder, asked, build)
    raise DataError(f"{folder}: there is no place to keep an index of it, neither in it, nor in the user's cache")


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _homes(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    """The folders to keep an index in, the best first, and what to call it there."""
    yield folder / ".paceline", name
    full = f"{name}-{_digest(os.path.realpath(folder))}"
    cache = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # somebody without a home
        yield (Path(cache) if cache else Path.home() / ".cache") / "paceline", full
    yield Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}", full


def _find(path: Path, folder: Path, asked: int) -> Index | None:
    """The index in a file, if it is whole and what it was made of is still the same."""
    try:
        index = Index(path)
        return index if index.facts.get("name") == path.name and _is_true(index, folder, asked) else None
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
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _make(path: Path, folder: Path, asked: int, build: Callable[[IndexBuilder], None]) -> Index:
    _prepare(path.parent)
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
            return Index(path, check=False)
        except OSError as error:
            raise NoRoomError from error


def _prepare(home: Path) -> None:
    """Make the folder that indexes are kept in; outside of the data it must be one of our own."""
    is_beside = home.name == ".paceline"
    try:
        if is_beside and not home.parent.stat().st_mode & 0o222:  # meant to stay as it is, though root could write
            raise NoRoomError
        if not is_beside:
            home.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            home.mkdir(mode=0o777 if is_beside else 0o700)
            time.sleep(1.5 * _TICK / _SECOND)  # its making changed the data's folder, which may be watched
        is_ours = home.lstat().st_uid == home.stat().st_uid == os.getuid()
    except OSError as error:
        raise NoRoomError from error
    if not (is_ours or is_beside) or not home.is_dir():
        raise NoRoomError


@contextmanager
def _locked(partial: Path, folder: Path) -> Iterator[IO[bytes]]:
    """The file that an index is written to, ours alone once whoever has it is done; unless renamed it is gone then."""
    with _telling(f"waiting for another process to index {folder}"):
        file = _lock(partial)
    with file:
        try:
            yield file
        finally:
            if _is_at(file, partial):
                partial.unlink()


def _lock(partial: Path) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        while True:
            file = os.fdopen(os.open(partial, flags, 0o666), "r+b")
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, partial):
                return file
            file.close()  # who had it has renamed or removed it
    except OSError as error:  # no permission, no space, or a file system without locks
        raise NoRoomError from error


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


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
