"""Locks on files. The kernel releases one when its holder closes the file or dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import time
from pathlib import Path

LOCK = ".lock"
"""The lock file of a run directory."""
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # by some network file systems
_POLL_SECONDS = 0.02
_MOUNTS = Path("/proc/self/mountinfo")

# File systems of one machine, and those whose locks all machines see; of others, some lock within a machine only.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"}
_SHARED = {"nfs", "nfs4", "ceph", "gpfs", "gfs2", "ocfs2", "lustre"}
_WITHIN_A_MACHINE = {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock"}


def try_lock(descriptor: int, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock an open file: False if another process holds it, None if its file system has no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def lock_file(path: Path, patience: float = math.inf) -> int:
    """A descriptor of the file at `path`, made if need be, that no other process has locked.

    Its holder may rename or remove the file: who waited for it begins again with what has the name then. A link is not
    followed. After `patience` seconds of waiting it is a `BlockingIOError`.
    """
    deadline = time.monotonic() + patience
    while True:
        descriptor = open_lock(path)
        try:
            is_locked = try_lock(descriptor, wait=patience == math.inf)
            if is_locked is None:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path))
            if is_locked and is_at(descriptor, path):
                return descriptor
            if not is_locked and time.monotonic() >= deadline:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process is writing it", str(path))
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not is_locked:
            time.sleep(_POLL_SECONDS)


def open_lock(path: Path) -> int:
    """Open a file to lock, and to read and write, making it if need be; never through a link, nor waiting on a pipe."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a file; True too where a lock cannot tell, as on some file systems."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not (try_lock(descriptor, shared=True) and is_seen_everywhere(path))
    finally:
        os.close(descriptor)


def is_seen_everywhere(path: Path) -> bool:
    """Whether a lock on a file there keeps out processes of all machines that can see it, as far as is known."""
    kind, options = _file_system(path)
    if kind == "lustre" and "flock" not in options:
        return False
    return kind in _LOCAL or (kind in _SHARED and not _WITHIN_A_MACHINE & options)


def _file_system(path: Path) -> tuple[str, set[str]]:
    """The type and the options of what is mounted there."""
    place = Path(os.path.realpath(path))
    found, longest = ("", set[str]()), -1
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        mounted, _, described = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mounted.split(" ")[4]))
        if place.is_relative_to(point) and len(point.parts) >= longest:  # of two at one place the last one is seen
            kind, _, options = described.split(" ", 2)
            found, longest = (kind, set(options.split(","))), len(point.parts)
    return found
