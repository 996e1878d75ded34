"""The folder of a run: what may be written there, and what of an earlier run is kept. Imports no torch."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

from paceline.core import atomic_write
from paceline.core.atomic_write import is_partial
from paceline.core.errors import UsageError
from paceline.core.regular_file import read_json
from paceline.core.text import join_first

# What a start that was cut short may leave before the run has a status; its lock may be empty, on a full disk.
_BEGINNINGS = {".lock", "logs", "recipe.yaml", "metrics.jsonl", "tensorboard"}


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
    is_begun = held == [".lock"] or ("logs" in held and _BEGINNINGS.issuperset(held))
    is_known = _is_object(out / "status.json", "state", "step") or _is_object(out / ".lock", "pid", "host")
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
