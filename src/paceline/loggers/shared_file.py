"""A file that several runs change: one at a time, each sees what the one before left, and readers never half of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.atomic_write import sync_folder
from paceline.core.errors import DataError
from paceline.core.file_lock import is_at, lock_file

_PATIENCE_SECONDS = 60.0  # others need a fraction of a second; who was stopped while it wrote is not waited for


@contextmanager
def alone_with(path: Path) -> Iterator[SharedFile]:
    """Have a file to oneself among all that change it this way; a DataError says if that cannot be had.

    The lock is on the file that is written aside, so nothing is left lying around; what a killed process left of
    one is written over.
    """
    place = Path(os.path.realpath(path))  # a link stays one: what it leads to is replaced
    _refuse_opened(path, place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f".{place.name}.partial")
        descriptor = _lock(path, aside)
        try:
            yield SharedFile(path, place, aside, descriptor)
        finally:
            if is_at(descriptor, aside):
                aside.unlink()
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from error


class SharedFile:
    """A file while nobody else changes it, or only a person who does not know of the lock."""

    def __init__(self, path: Path, place: Path, aside: Path, descriptor: int) -> None:
        self.path = path
        self._place, self._aside, self._descriptor = place, aside, descriptor
        self._found: os.stat_result | None = None

    def read(self, most: int) -> bytes | None:
        """What is in it, at most so many bytes; None if there is no such file."""
        self._found = None
        try:
            # Without blocking, or a pipe would be waited for until somebody writes into it.
            descriptor = os.open(self._place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            self._found = os.fstat(descriptor)
            if not stat.S_ISREG(self._found.st_mode):
                raise DataError(f"{self.path}: is not a file; expected a table of results")
            if not self._found.st_mode & 0o222 or not os.access(self._place, os.W_OK):
                raise DataError(f"{self.path}: is read-only; it stays as it is")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most + 1)
        finally:
            os.close(descriptor)
        if len(content) > most:
            raise DataError(f"{self.path}: has more than {most:,} bytes, too many for a table of results")
        return content

    def replace(self, content: bytes) -> bool:
        """Put `content` in its place, on the disk; False, and nothing done, if somebody changed it since it was read.

        A process that is killed meanwhile, or a full disk, leaves the file as it was.
        """
        os.ftruncate(self._descriptor, 0)
        left = memoryview(content)
        while left:
            left = left[os.pwrite(self._descriptor, left, len(content) - len(left)) :]
        if self._found is not None:
            os.fchmod(self._descriptor, stat.S_IMODE(self._found.st_mode))
        os.fsync(self._descriptor)
        if not self._is_as_found():
            return False
        self._aside.replace(self._place)
        sync_folder(self._place.parent)
        return True

    def _is_as_found(self) -> bool:
        try:
            now = self._place.stat()
        except FileNotFoundError:
            return self._found is None
        then = self._found
        return then is not None and os.path.samestat(now, then) and now.st_mtime_ns == then.st_mtime_ns


def _lock(path: Path, aside: Path) -> int:
    try:
        return lock_file(aside, _PATIENCE_SECONDS)
    except BlockingIOError as error:
        told = f"another process is writing it, for more than {_PATIENCE_SECONDS:.0f} seconds"
        raise DataError(f"{path}: {told}") from error


def _refuse_opened(path: Path, place: Path) -> None:
    """Spreadsheet programs leave a file beside the one they have open; what is saved there later would undo ours."""
    for name in (f"~${place.name}", f".~lock.{place.name}#"):
        if os.path.lexists(place.with_name(name)):
            raise DataError(
                f"{path}: is open in another program, as {place.with_name(name)} tells; close it there, or remove"
                " that file if it was left behind"
            )
