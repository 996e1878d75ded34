"""`best` in a run directory: a symbolic link to the best checkpoint, or a file with its path where links fail."""

from __future__ import annotations

import os
import re
from pathlib import Path

from paceline.core.atomic_write import move_aside, replace_file, sync_folder
from paceline.core.errors import CheckpointError
from paceline.core.regular_file import read_json

_STEP = re.compile(r"step-(\d{8,18})")
_POINTER = re.compile(r"(?!\.)[^/\0\n]+/step-\d{8,18}\n?")
_MAX_POINTER_BYTES = 300


def link_best(best: Path, target: Path) -> None:
    """Make `best` lead to `target`, a path relative to its folder, atomically."""
    partial = best.with_name(f".{best.name}.partial")
    if partial.is_dir() and not partial.is_symlink():
        move_aside(partial)
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(target)
    except OSError:  # FAT and some network file systems have no links
        replace_file(best, f"{target.as_posix()}\n".encode())
        return
    partial.replace(best)
    sync_folder(best.parent)


def read_pointer(file: Path) -> Path | None:
    """The checkpoint folder that a file names, whether or not it exists; None for any other file."""
    try:
        if not file.is_file() or file.stat().st_size > _MAX_POINTER_BYTES:
            return None
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return file.parent / text.rstrip("\n") if _POINTER.fullmatch(text) else None


def resolve_best(best: Path) -> Path | None:
    """The folder that `best` leads to, if it exists; itself in a copy of a run that was made without links."""
    folder = best if best.is_dir() else read_pointer(best)
    return Path(os.path.realpath(folder)) if folder is not None and folder.is_dir() else None


def find_checkpoint(run: Path, named: Path | None = None) -> Path:
    """The named checkpoint, else the run's best, else the run itself, which stands for its newest."""
    if named is not None:
        return named
    if resolve_best(run / "best") is not None:
        return run / "best"
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(
            f"{run} has no checkpoint: train first, or name a checkpoint; to evaluate weights, pass their file with"
            " --checkpoint, or set model.weights in the recipe"
        )
    return run


def best_step(run: Path) -> int | None:
    """The step of a run's best checkpoint, if it has one."""
    best = run / "best"
    if best.is_dir() and not best.is_symlink():
        manifest = read_json(best / "manifest.json")
        step = manifest.get("step") if isinstance(manifest, dict) else None
        return step if type(step) is int else None
    target = best.readlink() if best.is_symlink() else read_pointer(best)
    found = _STEP.fullmatch(target.name) if target else None
    return int(found[1]) if found else None
