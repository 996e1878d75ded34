"""Files in folders: found at any depth, named by patterns, never outside their root unless asked."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath

from paceline.core.errors import DataError
from paceline.core.text import pluralize

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
    return [f"{pluralize(total, 'file')} {verb} left out: {shown}; {what} are {', '.join(endings)} (`extensions`)"]


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


_MOST = 100_000  # names of a folder that are looked at


def hint_on_missing(root: Path, name: str) -> str:
    """What to do about `name`, which is no file in `root`, to be put behind a message; empty if nothing is known."""
    if any("\udc80" <= character <= "\udcff" for character in name):
        return "; the name is not UTF-8: is the list in another encoding, such as Latin-1? Save it as UTF-8"
    if "\\" in name:
        return f"; paths are written with /, as in {name.replace(chr(92), '/')!r}"
    meant = _similar(root, name)
    return f"; did you mean {meant!r}?" if meant else ""


def _similar(root: Path, name: str) -> str | None:
    """The file whose name differs in upper and lower case or in its ending alone."""
    found = PurePosixPath("/" if name.startswith("/") else "")
    *folders, last = PurePosixPath(name).parts[name.startswith("/") :] or ("",)
    for folder in folders:
        if not os.path.isdir(root / found / folder):  # noqa: PTH112 - False for what can be no name
            folder = _names(root / found)[0].get(folder.casefold(), "")  # noqa: PLW2901 - as it is spelled there
        if not folder:
            return None
        found /= folder
    by_name, by_stem = _names(root / found)
    stem = PurePosixPath(last).stem.casefold()
    meant = by_name.get(last.casefold()) or by_stem.get(stem) or by_stem.get(last.casefold())
    return str(found / meant) if meant else None


@lru_cache(maxsize=16)
def _names(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What is in a folder by its name in small letters, and the files by that without the ending."""
    try:
        with os.scandir(folder) as entries:
            names = [(entry.name, entry.is_file()) for entry in islice(entries, _MOST)]
    except OSError:
        return {}, {}
    by_stem = {PurePosixPath(name).stem.casefold(): name for name, is_file in names if is_file}
    return {name.casefold(): name for name, _ in names}, by_stem


_FIELD = re.compile(r"\{([^{}:]+)(?::0(\d{1,2}))?\}")  # {column} or {column:06}
_WHOLE = re.compile(r"([0-9]+)(?:\.0*)?")  # times are often written as 84.0


class NamePattern:
    """A name with columns of the list in braces, as in "{id}_{start:06}.mp4"; `:06` fills a number up to six digits.

    Columns may be numbers, counted from 0, as in "{1}_{2:06}.mp4".
    """

    def __init__(self, path: Path, pattern: str) -> None:
        self._path = path
        # Of each field three: the text before it, its column, its digits; then the text behind the last.
        parts = _FIELD.split(pattern)
        self._texts, self.columns, self._digits = parts[::3], parts[1::3], parts[2::3]
        if any(brace in text for text in self._texts for brace in "{}"):
            raise DataError(
                f"{path}: {pattern!r} is no pattern of names; expected one such as '{{id}}_{{start:06}}.mp4'"
            )

    def name(self, line: int, cells: Sequence[str]) -> str:
        """The name that the cells of `columns` make, in their order."""
        fields = zip(self.columns, self._digits, cells, strict=True)
        filled = [self._filled(line, column, digits, cell.strip()) for column, digits, cell in fields]
        return "".join(text + field for text, field in zip(self._texts, [*filled, ""], strict=True))

    def _filled(self, line: int, column: str, digits: str | None, cell: str) -> str:
        if digits is None and cell:
            return cell
        whole = None if digits is None else _WHOLE.fullmatch(cell)
        if digits is None or whole is None:
            expected = "something" if digits is None else "a whole number"
            named = f"column {column}" if column.isdecimal() else repr(column)
            advice = "; if this line names the columns, write names in the pattern" if column.isdecimal() else ""
            found = f"{self._path}, line {line}: {named} is {cell!r}"
            raise DataError(f"{found}, expected {expected} to make a name of{advice}")
        return whole[1].zfill(int(digits))
