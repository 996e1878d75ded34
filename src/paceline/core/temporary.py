"""Temporary folders that no killed process leaves for good: the next one that needs such a folder removes them."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path

from paceline.core.file_lock import try_lock

_PREFIX, _LOCK = "paceline-", ".lock"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for as long as it is needed."""
    folder, lock = _make()
    try:
        yield folder
    finally:
        _remove(folder, lock)


def share_folder(folder: Path | None = None) -> None:
    """Have all that this process forks put their sockets into one folder, which is temporary unless it is given.

    By itself, each of them makes a folder of its own, and leaves it behind if it is killed.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if folder is None and not settings.get("tempdir"):
        folder, lock = _make()
        Finalize(None, _remove, (folder, lock), exitpriority=-100)  # by this process only, by none that it forks
    if folder is not None:
        settings["tempdir"] = str(folder)


def _make() -> tuple[Path, int]:
    """A folder, and a file in it that names the machine and is locked for as long as this process lives."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / ".new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.write(lock, os.fsencode(socket.gethostname()))
    try_lock(lock)  # some network file systems have no locks; what lies there is not removed by others
    (folder / ".new").rename(folder / _LOCK)  # so nobody finds it unlocked
    return folder, lock


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(place: Path) -> None:
    """Remove the folders here that processes of this user on this machine have made and that none holds any more."""
    with suppress(OSError):
        for folder in place.iterdir():
            if _NAME.fullmatch(folder.name) and not folder.is_symlink():
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):  # not ours, no such folder, or gone by now
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            is_abandoned = try_lock(lock) and os.fstat(lock).st_uid == os.getuid()
            if is_abandoned and os.read(lock, 1024) == os.fsencode(socket.gethostname()):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
