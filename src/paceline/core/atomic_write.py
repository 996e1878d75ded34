"""Atomic writes: files survive a power cut, are never seen half-written, and never follow a planted link."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write the whole content, also if the system takes it in parts."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def create_file(path: Path) -> int:
    """A descriptor of a new file; whatever had its name is removed first, and a link is not followed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def partial_path(path: Path) -> Path:
    """A temporary path beside `path`, with a name that nobody else uses or could guess."""
    return path.with_name(f".{secrets.token_hex(8)}.partial")


def is_partial(name: str) -> bool:
    """Whether this is the name of a temporary file of a process that died."""
    return _PARTIAL.fullmatch(name) is not None


def remove_partial_files(folder: Path) -> None:
    """Remove what processes that died left half-written in a folder that no other one writes to."""
    with suppress(OSError):
        for path in folder.iterdir():
            if is_partial(path.name):
                path.unlink()


def replace_file(path: Path, content: bytes, is_durable: bool = True) -> None:
    """Write a file aside and rename it: a reader finds the old content or the new, never a part.

    Unless `is_durable` is False, it outlasts a power cut on return. An `OSError` names the file.
    """
    aside = partial_path(path)
    try:
        descriptor = create_file(aside)
        try:
            write_all(descriptor, content)
            if is_durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    if is_durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_aside(path: Path) -> Path:
    """Rename what is at `path` to the first free `NAME~1`, `NAME~2`, …; nothing is lost."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}~{number}")):
        number += 1
    return path.rename(aside)
