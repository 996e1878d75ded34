"""Images with one mask each, for segmentation and saliency."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from paceline.core.arguments import AtMostOneOf, Count, CountOrZero, ExactlyOneOf, KeyOf, Requires, SameLength, Unique
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import why_no_file
from paceline.core.text import join_first, pluralize
from paceline.data.argument_types import ClassNames, Color, Extensions, Name, PixelValue, SplitShares
from paceline.data.batch import Sample
from paceline.data.index.folders import EXTENSIONS, files_below, refuse_escaping_file
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.index.list_file import Row, at_line, encode_name, is_file_in, read_list
from paceline.data.index.splits import read_part, split_arguments, write_parts
from paceline.data.index.table_rows import LineNumbers, advice_on_delimiter, find_line
from paceline.data.io.image import MAX_PIXELS, Encoded, Pixels
from paceline.data.io.mask import MASK_EXTENSIONS, PaintedClasses, decode_grey, decode_ids, unknown_colors

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest


_FAINTEST = 32  # a mask that is nowhere lighter, but not empty, holds ids rather than grays


@register.dataset(
    "image_mask",
    checks=[
        KeyOf("split", "split_shares"),
        Requires("split", "split_shares"),
        ExactlyOneOf("classes", "binary"),
        AtMostOneOf("binary", "ignore_index"),
        Requires("colors", "classes"),
        SameLength("colors", "classes"),
    ],
)
class ImageMask:
    """Images in root/`images` and masks in root/`masks`, matched by their names without endings, at any depth.

    With `list_file`, in the root, only those that it names: a name a line, with or without an ending, or two columns
    of paths below the root, image and mask; those of a list that are not there are a DataError. A mask holds ids of
    `classes`, or `ignore_index` where nothing is known; any other value is a DataError, and so is a mask of another
    size than its image. With `colors`, one of each class, masks are painted; `ignore_index` is then any other color.
    A `binary` mask is a gray image from 0, background, to 255. With `split_shares` the pairs are split by chance, and
    `split` is one part.
    """

    channels = 3

    def __init__(
        self,
        root: Path,
        images: Name = "images",
        masks: Name = "masks",
        list_file: Name | None = None,
        classes: Annotated[ClassNames, Field(max_length=256)] | None = None,
        colors: Annotated[Sequence[Color], Unique()] | None = None,
        ignore_index: PixelValue | None = None,
        binary: bool = False,
        extensions: Extensions | None = None,
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
    ) -> None:
        self.root = root = Path(root)
        self.classes = ["foreground"] if binary else list(classes or [])
        self.ignore_index = ignore_index
        self.max_pixels = max_pixels
        self._painted = None if colors is None else PaintedClasses(colors, ignore_index)
        self._decode = decode_grey if binary else partial(decode_ids, painted=self._painted)
        self._is_known = None if binary else _known(len(self.classes), ignore_index)
        self._inside = inside = None if follow_links else root
        self._list = None if list_file is None else root / list_file
        if not root.is_dir():
            raise DataError(f"{root}: no such folder; expected one with the folders {images} and {masks}")

        def build(builder: IndexBuilder) -> None:
            folders = root / images, root / masks
            if self._list is None:
                size = write_matches(builder, root, folders, extensions, inside)
            else:
                size = write_list(builder, root, folders, self._list, extensions, inside)
            write_parts(builder, size, split_shares, split_seed)

        arguments = {"folders": [images, masks], "list": list_file, "extensions": extensions and list(extensions)}
        arguments |= {"follow_links": follow_links, "are_there": True} | split_arguments(split_shares, split_seed)
        try:
            self._index = open_index(root, "pairs", arguments, build)
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be listed ({error.strerror})") from error
        self._images, self._masks = self._index.ragged("image"), self._index.ragged("mask")
        self.notes = [note.decode(errors="replace") for note in self._index.texts("note")]
        if ignore_index is not None and ignore_index < len(self.classes):
            name = self.classes[ignore_index]
            self.notes.append(f"ignore_index {ignore_index} is the id of {name!r}, which is left out of all metrics")
        self._part = read_part(self._index, split, split_shares, len(self._images))

    def __len__(self) -> int:
        return len(self._part)

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        return self.root / os.fsdecode(self._images[self._part[index]].tobytes())

    def mask_path(self, index: int) -> Path:
        """The file of the mask of image `index`."""
        return self.root / os.fsdecode(self._masks[self._part[index]].tobytes())

    def place(self, index: int) -> str:
        """The line of the list that names image `index`, or its file without a list."""
        if self._list is None:
            return str(self.path(index))
        return at_line(self._list, find_line(self._index, int(self._part[index])))

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images and masks to a fingerprint, and what the list holds."""
        if self._list is not None:
            digest.content(self._list)
        for names in (self._images, self._masks):
            digest.files(self.root, names.texts(self._part))

    def unknown_colors(self, index: int) -> str:
        """The commonest colors of painted mask `index` that are of no class; empty if there is none."""
        return "" if self._painted is None else unknown_colors(self.mask_path(index), self.max_pixels, self._painted)

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, and its mask, uint8 [H, W]."""
        path, mask_path = self.path(index), self.mask_path(index)
        try:
            for each in (path, mask_path):
                refuse_escaping_file(each, self._inside)
            image = Encoded.read(path, self.max_pixels)
            mask = self._decode(mask_path, self.max_pixels)
            self._check(path, image, mask_path, mask)
        except (DataError, OSError, ValueError) as error:
            raise self._at_its_line(index, error) from error
        return {"image": image, "mask": mask}

    def read(self, index: int) -> Sample:
        """The same with the image decoded, uint8 [H, W, 3]."""
        sample = self.open(index)
        try:
            return {**sample, "image": sample["image"].decode()}
        except DataError as error:
            raise self._at_its_line(index, error) from error

    def _check(self, path: Path, image: Encoded, mask_path: Path, mask: Pixels) -> None:
        if mask.shape != (image.height, image.width):
            found = f"the mask is {mask.shape[1]}×{mask.shape[0]} pixels"
            expected = f"{image.width}×{image.height}; {_advice_on_size(image, mask)}"
            raise DataError(f"{mask_path}: {found}, but its image {path} {expected}")
        if self._is_known is None:
            if 0 < mask.max() < _FAINTEST:
                found = "its values are 0 and 1" if mask.max() == 1 else f"its largest value is {mask.max()}"
                scaled = "multiply them by 255 and save it again" if mask.max() == 1 else "save it so"
                advice = "if these are ids of classes, segment them: give their names as `classes`, without `binary`"
                raise DataError(f"{mask_path}: {found}; a binary mask is gray, from 0 to 255: {scaled}; {advice}")
        elif not self._is_known[mask].all():
            present = np.unique(mask)
            unknown = present[~self._is_known[present]].tolist()
            ignored = "" if self.ignore_index is None else f" or {self.ignore_index}, `ignore_index`"
            expected = f"expected 0 to {len(self.classes) - 1}, as `classes` has names,{ignored}".rstrip(",")
            advice = "correct it, name more classes, or set `ignore_index` to leave pixels out"
            raise DataError(f"{mask_path}: holds the ids {', '.join(map(str, unknown))}; {expected}; {advice}")

    def _at_its_line(self, index: int, error: Exception) -> DataError:
        return DataError(str(error) if self._list is None else f"{self.place(index)}: {error}")


def _advice_on_size(image: Encoded, mask: Pixels) -> str:
    orientation = image.header.orientation
    if orientation >= 5 and mask.shape == (image.width, image.height):
        return (
            f"the image carries the Exif orientation {orientation} and is turned upright when it is read, the mask is"
            " not: turn the mask likewise, or take the orientation out of the image"
        )
    return "save it at that size, or remove both"


def _known(num_classes: int, ignore_index: int | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    table = np.zeros(256, np.bool_)
    table[:num_classes] = True
    if ignore_index is not None:
        table[ignore_index] = True
    return table


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
        raise DataError(f"{found}: {join_first(absent, _SHOWN)}; {advice}")
    builder.texts("image", [os.fsencode(images[stem]) for stem in sorted(images)])
    builder.texts("mask", [os.fsencode(masks[stem]) for stem in sorted(images)])
    spare = [masks[stem] for stem in sorted(masks) if stem not in images]
    note = f"{pluralize(len(spare), 'mask')} without an image in {folders[0]}, not used: {join_first(spare, _SHOWN)}"
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
        raise DataError(
            f"{list_file}: {why_no_file(list_file)}; `list_file` is looked for in `root`, {root}: correct either"
        )
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
        found = f"no {what} for {len(absent):,} of {len(rows):,} names: {join_first(absent, _SHOWN)}"
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
