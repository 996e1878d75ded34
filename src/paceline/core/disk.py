"""What outlasts a power cut, and is never seen half-written."""

from __future__ import annotations

import os
from pathlib import Path


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write the whole content, however much the system takes at a time."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file aside and rename it: a reader finds the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
