"""What may be meant by a name that is none of a file."""

from __future__ import annotations

import os
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath

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
