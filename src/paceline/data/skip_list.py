"""Samples that cannot be read, where a run may continue without them: each is recorded once, up to a limit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from paceline.core.errors import DataError
from paceline.core.file_lock import lock_file

OnError = Literal["stop", "skip"]

UNREADABLE = (DataError, OSError, EOFError, ValueError)
"""What reading a sample may raise for it to count as unreadable; anything else is a mistake in a program."""

_SHARE, _MOST = 100, 100


class Skipped(NamedTuple):
    """A sample that was left out: its number, its file if there is one, and why."""

    sample: int
    path: str | None
    reason: str

    def __str__(self) -> str:
        return f"sample {self.sample}{f' ({self.path})' if self.path else ''}: {self.reason}"


def as_skipped(dataset: object, index: int, error: Exception) -> Skipped:
    """A sample that cannot be read: its file, if the data set says so, and a line on what is wrong with it."""
    find: Callable[[int], Any] | None = getattr(dataset, "path", None)
    path = str(find(index)) if find else None
    reason = " ".join(str(error).split()) or "no reason given"
    message = reason if isinstance(error, DataError) else f"{type(error).__name__}: {reason}"
    return Skipped(index, path, message.replace(f"{path}: " if path else f"sample {index}: ", ""))


def locate_error(dataset: object, index: int, error: DataError) -> DataError:
    """The error with the sample's file, and the line of a list that names it, before what does not tell them yet.

    A data set that knows no files is named itself, with the sample's number.
    """
    text = str(error)
    found = [getattr(dataset, name, None) for name in ("path", "place")]
    for find in filter(None, found):
        if str(find(index)) not in text:
            text = f"{find(index)}: {text}"
    if not any(found) and f"sample {index}: " not in text:
        text = f"{type(dataset).__name__}: sample {index}: {text}"
    return type(error)(text)


def automatic_limit(num_samples: int) -> int:
    """How many samples of a split may be left out by default: one in a hundred, from 1 to 100."""
    return min(_MOST, max(1, num_samples // _SHARE))


class SkipList:
    """What was left out of one split, over all processes and restarts of a run: they share one file of lines.

    Without a file it holds for this process alone. More samples than `limit` end the run.
    """

    def __init__(self, split: str, limit: int) -> None:
        self.split = split
        self.limit = limit
        self.path: Path | None = None
        self._log: Callable[[str], None] = partial(print, file=sys.stderr)
        self._known: dict[int, Skipped] = {}
        self._reported: set[int] = set()
        self._size = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[SkipList], tuple[str, int]]:
        return SkipList, (self.split, self.limit)  # on its way to a worker, which reads and tells nobody

    def __len__(self) -> int:
        return len(self._known)

    def open(self, path: Path, log: Callable[[str], None]) -> None:
        """Share the list in this file from now on, and warn through `log`; what it lists already is known."""
        self.path, self._log = path, log
        self._read_new()
        self._reported = set(self._known)

    def add(self, skipped: Sequence[Skipped]) -> None:
        """List what is new and warn of it; raises DataError once there is too much."""
        with self._lock:
            if any(each.sample not in self._known for each in skipped):
                try:
                    self._append(skipped)
                except OSError as error:  # a full disk, say: the run can go on without the list
                    self._log(f"cannot write to {self.path}: {error.strerror or error}")
                self._known |= {each.sample: each for each in skipped if each.sample not in self._known}
            self._warn({each.sample for each in skipped})
            self._check()

    def refresh(self) -> None:
        """Warn of what other processes have listed since; costs next to nothing when there is nothing new."""
        with self._lock:
            self._read_new()
            self._warn(set(self._known))

    def _warn(self, samples: set[int]) -> None:
        for sample in sorted(samples - self._reported):
            self._log(f"{self.split}: skipped {self._known[sample]}")
            self._reported.add(sample)

    def _check(self) -> None:
        if len(self._known) > self.limit:
            last = next(reversed(self._known.values()))
            where = f"; those met so far are listed in {self.path}" if self.path else ""
            raise DataError(
                f"data.{self.split}: {len(self._known)} samples cannot be read, and data.max_skipped allows"
                f" {self.limit}; the last is {last}{where}. Repair or remove them, or raise data.max_skipped"
            )

    def _append(self, skipped: Sequence[Skipped]) -> None:
        if self.path is None:
            return
        with os.fdopen(lock_file(self.path), "r+b") as file:
            content = file.read()
            self._take(content)
            new = [each for each in skipped if each.sample not in self._known]
            lines = "".join(f"{json.dumps({'split': self.split} | each._asdict())}\n" for each in new)
            # A process killed while it wrote may have left half a line.
            is_broken = content and not content.endswith(b"\n")
            file.write((b"\n" if is_broken else b"") + lines.encode())

    def _read_new(self) -> None:
        try:
            if self.path is not None and self.path.stat().st_size != self._size:
                self._take(self.path.read_bytes())
        except OSError:
            pass  # nothing is listed yet

    def _take(self, content: bytes) -> None:
        self._size = len(content)
        for line in content.splitlines():
            found = parse_skipped(line)
            if found is not None and found[0] == self.split:
                self._known.setdefault(found[1].sample, found[1])


def parse_skipped(line: bytes) -> tuple[str, Skipped] | None:
    """The split and the sample of a line of the file; None if it is damaged."""
    try:
        entry: Any = json.loads(line)
        return str(entry["split"]), Skipped(int(entry["sample"]), entry["path"], str(entry["reason"]))
    except (ValueError, KeyError, TypeError):
        return None
