"""Files in folders, found at any depth, and kept from leading out of them unasked."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from paceline.core.counting import counted
from paceline.core.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
"""How the names of image files end."""
_BESIDE = {
    *(".txt", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".xml", ".yaml", ".yml", ".lst", ".xlsx"),
    *(".md", ".rst", ".html", ".pdf", ".log", ".ini", ".db", ".md5", ".sha256", ".py", ".sh", ".npy", ".npz", ".srt"),
}  # of what is usual beside images and videos and never meant as one
_SHOWN = 8  # endings in a note


def folder_names(folder: Path) -> list[str]:
    """The folders in a folder, sorted, hidden ones left out."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def files_below(
    top: Path,
    name: str,
    endings: tuple[str, ...],
    inside: Path | None,
    enter: Callable[[Path], None],
    above: tuple[str, ...] = (),
    left_out: Counter[str] | None = None,
) -> Iterator[str]:
    """The files with these endings in folder `name` of `top` and below it, relative to `top`, in no order.

    Links may not lead out of `inside`. `enter` is called with each folder before it is looked into; `above` are the
    real folders that this one is in. Files with other endings are counted in `left_out`, by their endings.
    """
    folder = top / name
    real = os.path.realpath(folder)
    if real in above:
        raise DataError(f"{folder}: a link that leads back to a folder it is in ({real}); remove it")
    if not above:
        refuse_escape(folder, inside)
    enter(folder)
    with os.scandir(folder) as entries:
        listed = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in listed:
        is_folder = entry.is_dir()
        if not is_folder and not entry.name.lower().endswith(endings):
            if left_out is not None:
                _, dot, ending = entry.name.lower().rpartition(".")
                left_out[dot and f".{ending}"] += 1
            continue
        below = f"{name}/{entry.name}" if name else entry.name
        if entry.is_symlink():
            refuse_escape(top / below, inside)
        if is_folder:
            yield from files_below(top, below, endings, inside, enter, (*above, real), left_out)
        else:
            yield below


def left_out_note(left_out: Counter[str], what: str, endings: Sequence[str]) -> list[str]:
    """What to note about files that were left out, of which those that are usual beside others need no word."""
    counts = [(ending or "no ending", number) for ending, number in left_out.most_common() if ending not in _BESIDE]
    if not counts:
        return []
    total = sum(number for _, number in counts)
    shown = ", ".join(f"{ending} {number:,}" for ending, number in counts[:_SHOWN]) + ", …" * (len(counts) > _SHOWN)
    verb = "is" if total == 1 else "are"
    return [f"{counted(total, 'file')} {verb} left out: {shown}; {what} are {', '.join(endings)} (`extensions`)"]


def refuse_escape(path: Path, inside: Path | None) -> None:
    """Data may come from anywhere that a recipe names, but what lies in it may not lead elsewhere unasked."""
    if inside is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(inside)):
        target = os.path.realpath(path)
        raise DataError(f"{path}: leads out of {inside}, to {target}; add `follow_links: true` if that is meant")


def refuse_escaping_file(path: Path, inside: Path | None) -> None:
    """The same for files that are opened again and again, many of a folder: their folders are looked at once."""
    if inside is not None and (path.is_symlink() or not _is_plain(path.parent, inside)):
        refuse_escape(path, inside)


@lru_cache(maxsize=4096)
def _is_plain(folder: Path, inside: Path) -> bool:
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(inside))
