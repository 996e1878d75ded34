"""The user's cache folder: what can be rebuilt is kept there, never beside the data."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.core.errors import DataError


def cache_folder() -> Path:
    """The first cache folder that can be written to and is this user's alone; DataError if there is none.

    `PACELINE_CACHE`, else the user's cache; else a temporary folder.
    """
    tried = list(_places())
    for folder in tried:
        with suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            is_ours = folder.lstat().st_uid == folder.stat().st_uid == os.getuid()
            if is_ours and folder.is_dir() and os.access(folder, os.W_OK):
                return folder
    raise DataError(f"no cache folder: cannot write to {' nor '.join(map(str, tried))}; set PACELINE_CACHE to one")


def _places() -> Iterator[Path]:
    named, cache = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # somebody without a home
        yield Path(named) if named else (Path(cache) if cache else Path.home() / ".cache") / "paceline"
    yield Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
