"""The folder of a run: what may be written there, what is kept of an earlier run, and its lock. Imports no torch.

One process at a time writes into a run directory: it holds a lock on a file there, which the kernel releases.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from paceline.core import atomic_write
from paceline.core.atomic_write import is_partial
from paceline.core.errors import PacelineError, UsageError
from paceline.core.file_lock import LOCK, is_at, is_seen_everywhere, open_lock, try_lock
from paceline.core.regular_file import read_json
from paceline.core.text import join_first
from paceline.launch.environment import restart_count

# What a start that was cut short may leave before the run has a status; its lock may be empty, on a full disk.
_BEGINNINGS = {LOCK, "logs", "recipe.yaml", "metrics.jsonl", "tensorboard"}
_EXIT_SECONDS = 3.0
_PATIENCE_SECONDS = 5.0  # for a predecessor of this very run, which is being ended, to be gone
_LOOK_SECONDS = 0.1
_BYTES = 4096


def command_line(command: str, run: Path) -> str:
    """The words that run a command on a run directory, which knows the modules that it uses."""
    return shlex.join(["paceline", command, str(run)])


def check_writable(folder: Path) -> None:
    """Raise UsageError if nothing can be created in a folder."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise UsageError(f"{folder} cannot be a run directory: {existing} is a file; choose another with --out")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {existing}: {error.strerror}; choose another with --out"
        ) from error


def refuse_foreign(out: Path) -> None:
    """Raise UsageError if a folder holds anything but a run, whose files could be overwritten."""
    held = sorted(path.name for path in out.iterdir() if not is_partial(path.name)) if out.is_dir() else []
    is_begun = held == [LOCK] or ("logs" in held and _BEGINNINGS.issuperset(held))
    is_known = _is_object(out / "status.json", "state", "step") or _is_object(out / LOCK, "pid", "host")
    if not held or is_begun or is_known:
        return
    found = f"{out} is not a run directory and not empty: it holds {join_first(held, 5)}"
    raise UsageError(f"{found}; choose a new or empty one with --out")


def _is_object(path: Path, *keys: str) -> bool:
    """Whether a file holds a JSON object with these keys."""
    found = read_json(path)
    return isinstance(found, dict) and found.keys() >= set(keys)


def move_aside(out: Path) -> Path:
    """Rename an earlier run's directory to the first free `NAME~1`, `NAME~2`, ….

    If it is a link, its target is renamed and the link stays.
    """
    place = Path(os.path.realpath(out))
    try:
        return atomic_write.move_aside(place)
    except OSError as error:
        raise UsageError(
            f"{place}: cannot rename the earlier run: {error.strerror}; choose another directory with --out"
        ) from error


_held: set[int] = set()


def _let_go() -> None:
    while _held:
        os.close(_held.pop())


# A lock belongs to all processes that inherit it: loader workers must not keep a dead run's directory locked.
os.register_at_fork(after_in_child=_let_go)


@dataclass(frozen=True)
class Owner:
    """The process that holds a run directory, as its lock file says."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_here(self) -> bool:
        """Whether the process is or was on this machine."""
        return self.host == socket.gethostname()

    def is_running(self) -> bool:
        """Whether a process of this number runs on this machine."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # it is another user's
        return True


@contextmanager
def hold_lock(folder: Path) -> Iterator[RunLock]:
    """Hold the lock of a run directory, creating it if needed; UsageError names another holder.

    The lock of a dead process is taken over and reported in `notes`. An empty directory is removed.
    """
    place = Path(os.path.realpath(folder))  # what a link leads to may have to be made
    missing = [each for each in (place, *place.parents) if not each.exists()]
    place.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder)
    try:
        lock.take()
        yield lock
    finally:
        lock.release()
        with suppress(OSError):
            for each in missing:
                each.rmdir()


def check_free(folder: Path) -> None:
    """Raise UsageError if another process writes into a directory; does not take the lock."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        is_ours, owner = try_lock(descriptor, shared=True), _read(descriptor)
        deadline = time.monotonic() + _EXIT_SECONDS
        while is_ours is False and owner and owner.is_here and not owner.is_running() and time.monotonic() < deadline:
            time.sleep(0.05)  # its last threads are about to end
            is_ours = try_lock(descriptor, shared=True)
        _refuse(folder, owner, is_ours)
    finally:
        os.close(descriptor)


class RunLock:
    """The lock of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        """Notes for the user about how the lock was taken."""
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock, or raise UsageError."""
        deadline = time.monotonic() + (_PATIENCE_SECONDS if restart_count() else _LOOK_SECONDS)
        while not self._try(is_last=time.monotonic() >= deadline):
            time.sleep(_LOOK_SECONDS)

    def start_over(self) -> Path | None:
        """Rename the directory and lock a new one in its place; None if it was empty."""
        if {path.name for path in self.folder.iterdir()} <= {LOCK}:
            return None
        aside, old = move_aside(self.folder), self._descriptor
        Path(os.path.realpath(self.folder)).mkdir()
        self._descriptor = None
        try:
            while not self._try(is_last=True):
                pass
        finally:
            (aside / LOCK).unlink(missing_ok=True)
            _close(old)
        return aside

    def release(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                (self.folder / LOCK).unlink()
        _close(self._descriptor)
        self._descriptor = None

    def _try(self, is_last: bool) -> bool:
        path = self.folder / LOCK
        descriptor = _open(path)
        try:
            is_ours, owner = try_lock(descriptor), _read(descriptor)
            if is_ours is False and not is_last:
                return False
            if is_ours and not is_at(descriptor, path):  # its holder removed it just now
                return False
            _refuse(self.folder, owner, is_ours)
            _write(path, descriptor)
            if owner is not None:
                self.notes.append(f"took over the directory of {owner}, which no longer runs")
            self._descriptor, descriptor = descriptor, -1
            _held.add(self._descriptor)
            return True
        finally:
            if descriptor != -1:
                os.close(descriptor)


def _refuse(folder: Path, owner: Owner | None, is_ours: bool | None) -> None:
    """Raise UsageError if another process may write there; `is_ours` says whether we got the lock."""
    hint = "wait for it, stop it, or choose another directory with --out"
    if is_ours is False:
        raise UsageError(f"{folder} is in use by {owner or 'another process'}; {hint}")
    if owner is None or (is_ours and (owner.is_here or is_seen_everywhere(folder))):
        return  # the kernel knows better than what a dead process wrote
    if owner.is_running() if owner.is_here else not restart_count():
        raise UsageError(f"{folder} is in use by {owner}; {hint}; if it is gone, remove {folder / LOCK}")


def _open(path: Path) -> int:
    try:
        descriptor = open_lock(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot create the lock of the run directory: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path}: blocks the lock of the run directory; move it away")
    return descriptor


def _read(descriptor: int) -> Owner | None:
    try:
        written = json.loads(os.pread(descriptor, _BYTES, 0))
        return Owner(written["pid"], written["host"], written["since"])
    except (ValueError, TypeError, KeyError, OSError):
        return None


def _write(path: Path, descriptor: int) -> None:
    """Write this process as the owner; without disk space there is no lock."""
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    owner = Owner(os.getpid(), socket.gethostname(), since)
    content = json.dumps(asdict(owner)).encode() + b"\n"
    try:
        os.pwrite(descriptor, content, 0)  # first, as a file's own room is there on a full disk too
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise PacelineError(
            f"{path}: cannot lock the run directory: {error.strerror}; free disk space, or choose another with --out"
        ) from error


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        _held.discard(descriptor)
        os.close(descriptor)
