"""`best` in a run directory: a link to the best checkpoint, or where links cannot be made a file that names it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from paceline.core.atomic_write import replace_file, sync_folder
from paceline.core.regular_file import read_json

_NAME = re.compile(r"step-(\d{8,18})")
_TARGET = re.compile(r"(?!\.)[^/\0\n]+/step-\d{8,18}\n?")
_LONGEST = 300


def point(best: Path, target: Path) -> None:
    """Have `best` lead to `target`, a path relative to its folder, at once and whole."""
    aside = best.with_name(f".{best.name}.partial")
    aside.unlink(missing_ok=True)
    try:
        aside.symlink_to(target)
    except OSError:  # FAT and some network file systems have no links
        replace_file(best, f"{target.as_posix()}\n".encode())
        return
    aside.replace(best)
    sync_folder(best.parent)


def named_in(file: Path) -> Path | None:
    """The checkpoint folder that a file names, whether or not that is there; None for any other file."""
    try:
        if not file.is_file() or file.stat().st_size > _LONGEST:
            return None
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return file.parent / text.rstrip("\n") if _TARGET.fullmatch(text) else None


def target_of(best: Path) -> Path | None:
    """The folder that `best` leads to, if that is there; itself in a copy of a run that was made without links."""
    folder = best if best.is_dir() else named_in(best)
    return Path(os.path.realpath(folder)) if folder is not None and folder.is_dir() else None


def best_step(run: Path) -> int | None:
    """The step of a run's best checkpoint, if it keeps one."""
    best = run / "best"
    if best.is_dir() and not best.is_symlink():
        manifest = read_json(best / "manifest.json")
        step = manifest.get("step") if isinstance(manifest, dict) else None
        return step if type(step) is int else None
    target = best.readlink() if best.is_symlink() else named_in(best)
    found = _NAME.fullmatch(target.name) if target else None
    return int(found[1]) if found else None
