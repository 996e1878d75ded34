"""Files in folders: found at any depth, named by an index, never outside their root unless asked."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.text import join_first, pluralize
from paceline.data.batch import Sample
from paceline.data.index.index import IndexBuilder, Part, open_index
from paceline.data.io.image import Encoded, read_size
from paceline.data.mapped_arrays import MappedArrays
from paceline.data.skip_list import locate_error

_USUAL = {
    *(".txt", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".xml", ".yaml", ".yml", ".lst", ".xlsx"),
    *(".md", ".rst", ".html", ".pdf", ".log", ".ini", ".db", ".md5", ".sha256", ".py", ".sh", ".npy", ".npz", ".srt"),
}  # beside images and videos, and never meant as one
_SPLITS = {"train", "val", "valid", "validation", "test"}
_MAX_SUFFIXES = 8  # extensions in a note
ANY_SIZE = 1 << 30
_MAX_ENTRIES = 100_000  # names of a folder that a hint is looked for among


def folder_names(folder: Path) -> list[str]:
    """The folders in a folder, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def class_folders(root: Path, folder: Path, example: str) -> list[str]:
    """The names of the class folders in `folder`, which is `root` or a split in it; DataError if there are none."""
    layout = f"expected {folder}/<class>/<{example}>, a folder per class"
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; {layout}")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; {root} has {', '.join(folder_names(root)) or 'no folders'}")
    names = folder_names(folder)
    if not names:
        raise DataError(f"{folder}: no class folders in it; {layout}")
    if folder == root and "train" in names and _SPLITS.issuperset(names):
        raise DataError(f"{root}: has the splits {', '.join(names)}, not classes; add `split: train`")
    return names


def files_below(
    top: Path,
    name: str,
    extensions: tuple[str, ...],
    inside: Path | None,
    watch: Callable[[Path], None],
    above: tuple[str, ...] = (),
    skipped: Counter[str] | None = None,
) -> Iterator[str]:
    """The files with these extensions in folder `name` of `top` and below it, relative to `top`, in no order.

    A link that leads out of `inside` is a DataError. `watch` is called with each folder before it is listed; `above`
    are the real folders that this one is in. Files with other extensions are counted in `skipped`, by extension.
    """
    folder = top / name
    real = os.path.realpath(folder)
    if real in above:
        raise DataError(f"{folder}: a link that leads back to a folder it is in ({real}); remove it")
    if not above:
        refuse_escape(folder, inside)
    watch(folder)
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in visible:
        is_folder = entry.is_dir()
        if not is_folder and not entry.name.lower().endswith(extensions):
            if skipped is not None:
                skipped[PurePosixPath(entry.name.lower()).suffix] += 1
            continue
        below = f"{name}/{entry.name}" if name else entry.name
        if entry.is_symlink():
            refuse_escape(top / below, inside)
        if is_folder:
            yield from files_below(top, below, extensions, inside, watch, (*above, real), skipped)
        else:
            yield below


def skipped_note(skipped: Counter[str], what: str, extensions: Sequence[str]) -> str:
    """A note on files that were skipped, but for those that are usual beside data; empty if there is nothing to say."""
    counts = [(suffix or "no extension", number) for suffix, number in skipped.most_common() if suffix not in _USUAL]
    if not counts:
        return ""
    total = sum(number for _, number in counts)
    counted = join_first([f"{suffix} {number:,}" for suffix, number in counts], _MAX_SUFFIXES)
    verb = "is" if total == 1 else "are"
    return f"{pluralize(total, 'file')} {verb} skipped: {counted}; {what} are {', '.join(extensions)} (`extensions`)"


def refuse_escape(path: Path, inside: Path | None) -> None:
    """Data may come from anywhere that a recipe names, but what lies in it may not lead elsewhere unasked."""
    if inside is not None and not _is_inside(path, inside):
        target = os.path.realpath(path)
        raise DataError(f"{path}: leads out of {inside}, to {target}; add `follow_links: true` if that is meant")


def _is_inside(path: Path, inside: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(inside))


_folder_is_inside = lru_cache(maxsize=4096)(_is_inside)
"""The same, looked at once for each folder: many files of it are opened again and again."""


class NamedFiles:
    """The files that an array of an index names, relative to a folder; one that leads out of `inside` is refused."""

    def __init__(self, index: MappedArrays, name: str, folder: Path, inside: Path | None) -> None:
        self.folder, self._inside = folder, inside
        self._names = index.rows(name)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, row: int) -> str:
        """The name of a file as the index has it."""
        return os.fsdecode(self._names[row].tobytes())

    def names(self, rows: Iterable[int]) -> Iterator[bytes]:
        """The names of several files."""
        return self._names.texts(rows)

    def path(self, row: int) -> Path:
        """A file, wherever it leads."""
        return self.folder / self.name(row)

    def checked(self, row: int) -> Path:
        """A file that is to be opened; DataError if it leads out."""
        path = self.path(row)
        if self._inside is not None and (path.is_symlink() or not _folder_is_inside(path.parent, self._inside)):
            refuse_escape(path, self._inside)
        return path


class FileDataset:
    """A data set whose samples are the files that an index names, or a part of them. Images are decoded when read."""

    channels = 3
    _files: NamedFiles
    _part: Part

    def __len__(self) -> int:
        return len(self._part)

    def path(self, index: int) -> Path:
        """The file of sample `index`."""
        return self._files.path(self._part[index])

    def image_sizes(self) -> NDArray[np.int64]:
        """The height and width of each image as it is read, [N, 2]; the headers of files are read once and indexed."""
        names = sha256(b"\0".join(self._files.names(self._part))).hexdigest()

        def build(builder: IndexBuilder) -> None:
            builder.append("sizes", read_sizes(map(self.path, range(len(self))), builder))

        return open_index(self._files.folder, "sizes", {"files": names}, build)["sizes"]

    def open(self, index: int) -> Sample:
        """Sample `index` with its image not decoded yet."""
        raise NotImplementedError

    def read(self, index: int) -> Sample:
        """Sample `index` with its image decoded, uint8 [H, W, 3]; the transform that cuts clips decodes a video."""
        sample = self.open(index)
        if not isinstance(sample["image"], Encoded):
            return sample
        try:
            return {**sample, "image": sample["image"].decode()}
        except DataError as error:
            raise locate_error(self, index, error) from error


def read_sizes(paths: Iterable[Path], builder: IndexBuilder) -> NDArray[np.int64]:
    """The height and width of each image, [N, 2]; huge where it cannot be read, which is reported when it is needed."""
    sizes = []
    for path in paths:
        sizes.append((ANY_SIZE, ANY_SIZE))
        with suppress(DataError, OSError):
            builder.watch(path)
            sizes[-1] = read_size(path)
    return np.array(sizes, np.int64).reshape(-1, 2)


def hint_on_missing(root: Path, name: str) -> str:
    """What to do about `name`, which is no file in `root`, to be put behind a message; empty if nothing is known."""
    if any("\udc80" <= character <= "\udcff" for character in name):
        return "; the name is not UTF-8: is the list in another encoding, such as Latin-1? Save it as UTF-8"
    if "\\" in name:
        return f"; paths are written with /, as in {name.replace(chr(92), '/')!r}"
    asked = PurePosixPath(name)
    wanted = asked.name.casefold(), asked.stem.casefold()
    for there in _names_in(root / asked.parent):
        if there.casefold() in wanted or PurePosixPath(there).stem.casefold() in wanted:
            return f"; did you mean {str(asked.parent / there)!r}?"
    return ""


@lru_cache(maxsize=16)
def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, _MAX_ENTRIES)]
    except (OSError, ValueError):
        return []
