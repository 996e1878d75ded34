"""The user's cache folder: what can be rebuilt is kept there, never beside the data."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cache_folders() -> Iterator[Path]:
    """The cache folders, the preferred one first: `PACELINE_CACHE`, the user's cache, a temporary folder."""
    named, cache = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # somebody without a home
        yield Path(named) if named else (Path(cache) if cache else Path.home() / ".cache") / "paceline"
    yield Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Make a cache folder; an OSError if that fails, or if it belongs to somebody else."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    is_ours = folder.lstat().st_uid == folder.stat().st_uid == os.getuid()
    if not is_ours or not folder.is_dir():
        raise PermissionError(errno.EPERM, "not a folder of this user", str(folder))
