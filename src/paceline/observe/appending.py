"""A file that grows by whole pieces: what a full disk cuts off is taken back, and written again later."""

from __future__ import annotations

import os
from pathlib import Path


class GrowingFile:
    """Appends pieces of bytes, each entirely or not at all; opened (and its folder made) at the first piece.

    A piece that could not be written is kept, and goes before the next one. The `OSError` names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._unwritten = b""

    def append(self, piece: bytes) -> None:
        """Add `piece`, after all that is still to be written; when this returns, the system has it."""
        self._unwritten += piece
        try:
            if self._descriptor is None:
                self._descriptor = _open(self.path)
            _write_whole(self._descriptor, self._unwritten)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._unwritten = b""

    def close(self) -> None:
        """Write what is left and close the file; a later piece opens it again."""
        try:
            if self._unwritten:
                self.append(b"")
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _write_whole(descriptor: int, data: bytes) -> None:
    size = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        if written:
            os.ftruncate(descriptor, size)
        raise
