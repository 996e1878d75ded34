"""Where indexes are kept: in the user's cache folder, bounded in size. Nothing is written beside the data.

Other programs take every folder beside images for a class; and an index that came with the data, from somebody else,
could name any file of this machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.data.index.index_file import NoRoomError

MAX_BYTES = 2 << 30
"""What all indexes may take together; those that were not used for longest are removed first."""
_DAY = 86_400


def cache_folders() -> Iterator[Path]:
    """The folders to keep indexes in, the best first."""
    named, cache = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # somebody without a home
        yield Path(named) if named else (Path(cache) if cache else Path.home() / ".cache") / "paceline"
    yield Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def prepare(folder: Path) -> None:
    """Make a folder to keep indexes in, which must be one of our own."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        is_ours = folder.lstat().st_uid == folder.stat().st_uid == os.getuid()
    except OSError as error:
        raise NoRoomError from error
    if not is_ours or not folder.is_dir():
        raise NoRoomError


def mark_used(path: Path) -> None:
    """Have an index be among the last that are removed."""
    with suppress(OSError):
        os.utime(path)


def remove_oldest(folder: Path, newest: Path) -> None:
    """Remove the indexes that were not used for longest, until the others fit; `newest` always stays.

    Who has one open can go on reading it.
    """
    found = []
    for path in folder.glob("index-*"):
        with suppress(OSError):
            status = path.stat()
            is_being_written = path.suffix == ".partial" and time.time() - status.st_mtime < _DAY
            if path != newest and not is_being_written:
                found.append((status.st_mtime_ns, status.st_size, path))
    room = MAX_BYTES - newest.stat().st_size
    for _, size, path in sorted(found, reverse=True):
        room -= size
        if room < 0:
            path.unlink(missing_ok=True)
