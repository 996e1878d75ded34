"""Which mask belongs to which image: by the names of the files, or as a list says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath

from paceline.core.counting import counted, listed
from paceline.core.errors import DataError
from paceline.data.indexes.folders import EXTENSIONS, files_below
from paceline.data.indexes.index import IndexBuilder
from paceline.data.indexes.line_numbers import LineNumbers
from paceline.data.indexes.listing import Row, at_line, encode_name, is_file_in, read_list
from paceline.data.indexes.table_rows import advice_on_delimiter
from paceline.data.reading.masks import MASK_EXTENSIONS

_CHUNK = 1 << 14
_SHOWN = 5

Folders = tuple[Path, Path]


def write_matches(
    builder: IndexBuilder, root: Path, folders: Folders, extensions: Sequence[str] | None, inside: Path | None
) -> int:
    """All images of the first folder with their masks in the second, in the order of their names."""
    images, masks = _stems(builder, root, folders, extensions, inside)
    absent = [images[stem] for stem in sorted(images) if stem not in masks]
    if absent:
        advice = "add them, or name the images to use in a `list_file`"
        found = f"no mask in {folders[1]} for {len(absent):,} of {len(images):,} images"
        raise DataError(f"{found}: {listed(absent, _SHOWN)}; {advice}")
    builder.texts("image", [os.fsencode(images[stem]) for stem in sorted(images)])
    builder.texts("mask", [os.fsencode(masks[stem]) for stem in sorted(images)])
    spare = [masks[stem] for stem in sorted(masks) if stem not in images]
    note = f"{counted(len(spare), 'mask')} without an image in {folders[0]}, not used: {listed(spare, _SHOWN)}"
    builder.texts("note", [os.fsencode(note)] if spare else [])
    return len(images)


def write_list(
    builder: IndexBuilder,
    root: Path,
    folders: Folders,
    list_file: Path,
    extensions: Sequence[str] | None,
    inside: Path | None,
) -> int:
    """The images that a list names, in its order, with the masks beside them or of the same name."""
    if not list_file.is_file():
        raise DataError(f"{list_file}: no such list; `list_file` is looked for in `root`, {root}: correct either")
    builder.watch(list_file, by_content=True)
    notes = list[str]()
    is_file = partial(_is_image, root, folders[0], tuple(extensions or EXTENSIONS))
    rows = read_list(list_file, None, None, None, "mask", is_file=is_file, is_fixed=True, notes=notes)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{list_file}: the list is empty; expected a line for each image")
    all_rows = chain([first], rows)
    builder.texts("note", [note.encode(errors="replace") for note in notes])
    if first.beside is not None:
        return _write_columns(builder, root, list_file, all_rows)
    images, masks = _stems(builder, root, folders, extensions, inside)
    found = list(all_rows)
    stems = [_known_stem(row.image, images) for row in found]
    _refuse_absent(list_file, found, [stem not in images for stem in stems], f"image in {folders[0]}")
    _refuse_absent(list_file, found, [stem not in masks for stem in stems], f"mask in {folders[1]}")
    builder.texts("image", [os.fsencode(images[stem]) for stem in stems])
    builder.texts("mask", [os.fsencode(masks[stem]) for stem in stems])
    LineNumbers(builder).append([row.line for row in found])
    return len(found)


def _write_columns(builder: IndexBuilder, root: Path, list_file: Path, rows: Iterable[Row]) -> int:
    lines, files, size, remaining = LineNumbers(builder), _NamedFiles(builder, root), 0, iter(rows)
    while chunk := list(islice(remaining, _CHUNK)):
        images = [encode_name(list_file, row.line, row.image) for row in chunk]
        masks = [encode_name(list_file, row.line, _mask_name(list_file, row)) for row in chunk]
        for row, image, mask in zip(chunk, images, masks, strict=True):
            files.check(image, row.line)
            files.check(mask, row.line)
        builder.texts("image", images)
        builder.texts("mask", masks)
        lines.append([row.line for row in chunk])
        size += len(chunk)
    files.refuse_absent(list_file)
    return size


class _NamedFiles:
    """Looks whether the files that a list names are there; of those that are not, it keeps the first few."""

    def __init__(self, builder: IndexBuilder, root: Path) -> None:
        self._builder, self._root = builder, root
        self._base = os.fsencode(root)
        self._folders: set[bytes] = set()
        self._absent: list[str] = []
        self._num_files = self._num_absent = 0

    def check(self, name: bytes, line: int) -> None:
        """Have this file, named in a line, told by `refuse_absent` unless it is there."""
        folder = os.path.dirname(name)  # noqa: PTH120 - names are bytes, and many
        if folder not in self._folders:
            self._folders.add(folder)
            with suppress(OSError, ValueError):  # its files are absent, so there is no index to be made anew
                self._builder.watch(self._root / os.fsdecode(folder))
        self._num_files += 1
        if not os.path.exists(os.path.join(self._base, name)):  # noqa: PTH110, PTH118 - as above
            self._num_absent += 1
            if len(self._absent) < _SHOWN:
                self._absent.append(f"{os.fsdecode(name)} (line {line})")

    def refuse_absent(self, list_file: Path) -> None:
        """Raise DataError if a file was not there."""
        if self._num_absent:
            more = self._num_absent - len(self._absent)
            named = ", ".join(self._absent) + (f" and {more:,} more" if more else "")
            found = f"not in {self._root} are {self._num_absent:,} of the {self._num_files:,} files that it names"
            raise DataError(f"{list_file}: {found}: {named}; add them, or take their lines out of the list")


def _mask_name(list_file: Path, row: Row) -> str:
    if not isinstance(row.beside, str) or not row.beside:
        raise DataError(f"{at_line(list_file, row.line)}: {row.beside!r} is not the name of a mask")
    return row.beside


def _refuse_absent(list_file: Path, rows: Sequence[Row], is_absent: Sequence[bool], what: str) -> None:
    absent = [f"{row.image} (line {row.line})" for row, missing in zip(rows, is_absent, strict=True) if missing]
    if absent:
        found = f"no {what} for {len(absent):,} of {len(rows):,} names: {listed(absent, _SHOWN)}"
        advice = "add the files, or take the names out of the list"
        raise DataError(f"{list_file}: {found}; {advice_on_delimiter([rows[0].image], is_fixed=True) or advice}")


def _stems(
    builder: IndexBuilder, root: Path, folders: Folders, extensions: Sequence[str] | None, inside: Path | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The images and the masks, as paths below the root, by their names in their folders without endings."""
    endings: tuple[str, ...] = EXTENSIONS
    mask_endings: tuple[str, ...] = MASK_EXTENSIONS
    if os.path.realpath(folders[0]) == os.path.realpath(folders[1]):  # only the endings tell photos from masks
        endings, mask_endings = (".jpg", ".jpeg"), (".png", ".bmp")
    if extensions:
        endings = tuple(extension.lower() for extension in extensions)
    images = _by_stem(builder, root, folders[0], endings, inside)
    masks = _by_stem(builder, root, folders[1], mask_endings, inside)
    if not images:
        raise DataError(f"{folders[0]}: no images in this folder; expected files ending in {' '.join(endings)}")
    return images, masks


def _by_stem(
    builder: IndexBuilder, root: Path, folder: Path, endings: tuple[str, ...], inside: Path | None
) -> dict[str, str]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the folders of images and masks as `images` and `masks`")
    found: dict[str, str] = {}
    below = os.path.relpath(folder, root)
    for name in files_below(folder, "", endings, inside, builder.watch):
        stem = str(PurePosixPath(name).with_suffix(""))
        if stem in found:
            raise DataError(f"{folder}: {found[stem]} and {name} have the same name but for their endings; keep one")
        found[stem] = f"{below}/{name}"
    return found


def _is_image(root: Path, folder: Path, endings: Sequence[str], name: str) -> bool:
    """Whether a name in a list is that of a file below the root, or of an image in its folder, but for the ending."""
    return is_file_in(root, name) or any(is_file_in(folder, f"{name}{ending}") for ending in ("", *endings))


def _known_stem(name: str, images: dict[str, str]) -> str:
    """A name in a list as it is, or without its ending."""
    return name if name in images else os.path.splitext(name)[0]  # noqa: PTH122 - the name is kept as it is written
