"""Images with one mask each, for segmentation and saliency."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated

import numpy as np
from pydantic import Field

from paceline.core.arguments import AtLeastOneOf, AtMostOneOf, CountOrZero, KeyOf, Requires, SameLength, Unique
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.core.regular_file import why_no_file
from paceline.core.text import join_first, pluralize
from paceline.data.argument_types import ClassNames, Color, Extensions, IdRanges, Name, PixelValue, SplitShares
from paceline.data.batch import Sample
from paceline.data.fingerprint import DataDigest
from paceline.data.index.folders import FileDataset, NamedFiles, files_below
from paceline.data.index.index import IndexBuilder, drawn_part, open_index
from paceline.data.index.list_file import (
    Columns,
    Row,
    at_line,
    delimiter_hint,
    encode_name,
    read_list,
)
from paceline.data.io.image import EXTENSIONS, Encoded, Pixels
from paceline.data.io.mask import (
    MASK_EXTENSIONS,
    MAX_ID,
    LabelMap,
    PaintedClasses,
    decode_gray,
    decode_ids,
)

_FAINTEST = 32  # a mask that is nowhere lighter, but not empty, holds ids rather than grays
_MAX_NAMES = 5
_STEM = "{stem}"
_COMPARED = 500  # names of either side among which a pattern is looked for


@register.dataset(
    "image_mask",
    checks=[
        KeyOf("split", "split_shares"),
        Requires("split", "split_shares"),
        AtLeastOneOf("classes", "label_map", "binary"),
        AtMostOneOf("classes", "binary"),
        AtMostOneOf("binary", "ignore_index"),
        AtMostOneOf("colors", "label_map"),
        Requires("colors", "classes"),
        SameLength("colors", "classes"),
    ],
)
class ImageMask(FileDataset):
    """Images and masks that are matched by their names without extensions, at any depth of the folders.

    `images` and `masks` are folders in the root, or patterns such as "PedMasks/{stem}_mask.png"; a pattern of masks
    without a folder is looked for beside the images. With `list_file`, in the root, only the images that it names: a
    name a line, with or without an extension, or two columns of paths below the root, image and mask.
    A mask holds ids of `classes`, or `ignore_index` where nothing is known; any other id is a DataError, and so is a
    mask of another size than its image. `label_map` gives the ids of each class, such as {person: 1-255}, which turns
    instance masks into semantic ones; 0 is the background unless it is named, and `ignore_index` is any other id. With
    `colors`, one of each class, masks are painted; `ignore_index` is then any other color. A `binary` mask is gray
    from 0, background, to 255. With `split_shares` the split is drawn.
    """

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
        label_map: Annotated[Mapping[Name, IdRanges], Field(min_length=1)] | None = None,
    ) -> None:
        self.root = root = Path(root)
        self.classes, label_ids = _classes_and_ids(classes, label_map, ignore_index, binary)
        self.ignore_index = ignore_index
        mapped = label_ids or (None if colors is None else PaintedClasses(colors, ignore_index))
        self._decode: Callable[[Path], Pixels]
        self._decode = decode_gray if binary and mapped is None else partial(decode_ids, mapped=mapped)
        known = {*range(len(self.classes)), *(() if ignore_index is None else (ignore_index,))}
        self._is_known = None if binary else np.isin(np.arange(256), list(known))
        inside = None if follow_links else root
        self._list = None if list_file is None else root / list_file
        if not root.is_dir():
            raise DataError(f"{root}: no such folder; expected one with the folders {images} and {masks}")

        def build(builder: IndexBuilder) -> None:
            pairs = ImageMaskPairs(builder, root, images, masks, extensions, inside)
            found = pairs.find_all() if self._list is None else pairs.read_list(self._list)
            builder.append_texts("image", [image for image, _ in found])
            builder.append_texts("mask", [mask for _, mask in found])

        arguments = {"folders": [images, masks], "list": list_file, "extensions": extensions and list(extensions)}
        self._index = open_index(root, "pairs", arguments | {"follow_links": follow_links}, build)
        self._files, self._masks = (NamedFiles(self._index, name, root, inside) for name in ("image", "mask"))
        self.notes: list[str] = list(self._index.facts["notes"])
        if ignore_index is not None and ignore_index < len(self.classes):
            name = self.classes[ignore_index]
            self.notes.append(f"ignore_index {ignore_index} is the id of {name!r}, which is left out of all metrics")
        self._part = drawn_part(len(self._files), split, split_shares, split_seed)

    def mask_path(self, index: int) -> Path:
        """The file of the mask of image `index`."""
        return self._masks.path(self._part[index])

    def place(self, index: int) -> str:
        """The line of the list that names image `index`, or its file without a list."""
        if self._list is None:
            return str(self.path(index))
        return at_line(self._list, int(self._index["line"][self._part[index]]))

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images and masks to a fingerprint, and the content of the list."""
        if self._list is not None:
            digest.content(self._list)
        for files in (self._files, self._masks):
            digest.files(self.root, files.names(self._part))

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, and its mask, uint8 [H, W]."""
        row = self._part[index]
        try:
            image = Encoded.read(self._files.checked(row))
            mask = self._decode(self._masks.checked(row))
            self._check(index, image, mask)
        except (DataError, OSError, ValueError) as error:
            raise DataError(str(error) if self._list is None else f"{self.place(index)}: {error}") from error
        return {"image": image, "mask": mask}

    def _check(self, index: int, image: Encoded, mask: Pixels) -> None:
        mask_path = self.mask_path(index)
        if mask.shape != (image.height, image.width):
            advice, orientation = "save it at that size, or remove both", image.orientation
            if orientation >= 5 and mask.shape == (image.width, image.height):
                turned = f"the image carries the Exif orientation {orientation} and is turned upright when it is read"
                advice = f"{turned}, the mask is not: turn the mask likewise, or take the orientation out of the image"
            found = f"the mask is {mask.shape[1]}×{mask.shape[0]} pixels"
            expected = f"{image.width}×{image.height}; {advice}"
            raise DataError(f"{mask_path}: {found}, but its image {self.path(index)} {expected}")
        if self._is_known is None:
            if 0 < mask.max() < _FAINTEST:
                found = f"its largest value is {mask.max()}, but a binary mask is gray from 0 to 255"
                cure = f"add `label_map: {{foreground: 1-{mask.max()}}}` if all ids above 0 are foreground"
                raise DataError(f"{mask_path}: {found}; {cure}, or give `classes` instead of `binary`")
        elif not self._is_known[mask].all():
            present = np.unique(mask)
            unknown = present[~self._is_known[present]].tolist()
            ignored = "" if self.ignore_index is None else f" or {self.ignore_index}, `ignore_index`"
            expected = f"expected 0 to {len(self.classes) - 1}, as `classes` has names,{ignored}".rstrip(",")
            merged = f"`label_map: {{{self.classes[-1]}: {len(self.classes) - 1}-{max(unknown)}}}`"
            advice = f"name their classes, merge ids, as with {merged}, or set `ignore_index` to leave pixels out"
            raise DataError(f"{mask_path}: holds the ids {join_first(unknown, 2 * _MAX_NAMES)}; {expected}; {advice}")


def _classes_and_ids(
    classes: Sequence[str] | None, label_map: Mapping[str, IdRanges] | None, ignore_index: int | None, binary: bool
) -> tuple[list[str], LabelMap | None]:
    """The classes, after the background if a label map does not name it, and the ids that the map gives them."""
    spans = {name: _spans(given) for name, given in (label_map or {}).items()}
    named = sorted(span for each in spans.values() for span in each)
    has_background = not named or named[0][0] == 0
    names = list(classes if classes is not None else spans if has_background else ["background", *spans])
    names = ["foreground"] if binary else names
    if not spans:
        return names, None
    unknown = next((name for name in spans if name not in names), None)
    if unknown is not None:
        raise ArgumentError("label_map", f"{unknown!r} is no class; the classes are {', '.join(names)}")
    if binary:
        return names, LabelMap({0: [(0, MAX_ID)], 255: spans["foreground"]}, None)
    overlap = next((after for before, after in pairwise(named) if after[0] <= before[1]), None)
    if overlap is not None:
        raise ArgumentError("label_map", f"the id {overlap[0]} belongs to two classes")
    ranges = {names.index(name): each for name, each in spans.items()}
    return names, LabelMap(ranges if has_background else {0: [(0, 0)]} | ranges, ignore_index)


def _spans(ranges: IdRanges) -> list[tuple[int, int]]:
    """Ids and ranges of ids, such as 7, "1-255" or a list of both, as first and last ids."""
    if isinstance(ranges, int):
        return [(ranges, ranges)]
    if not isinstance(ranges, str):
        return [span for each in ranges for span in _spans(each)]
    first, last = map(int, ranges.split("-"))
    if not first <= last <= MAX_ID:
        raise ArgumentError("label_map", f"expected a range of ids from 0 to {MAX_ID}, got {ranges}")
    return [(first, last)]


class _Pattern:
    """A folder of files, perhaps with a pattern of their names: "masks", "masks/{stem}_mask.png", "{stem}.png"."""

    def __init__(self, key: str, text: str, root: Path, beside: Path | None, extensions: tuple[str, ...]) -> None:
        before, found, after = text.partition(_STEM)
        if text.count("{") != (1 if found else 0) or "/" in after:
            raise ArgumentError(key, f"expected a folder, or a pattern such as masks/{_STEM}_mask.png, got {text}")
        self.is_named, suffix = bool(found), PurePosixPath(after).suffix
        parent, _, prefix = before.rpartition("/") if found else (text, "", "")
        self.folder = beside if beside is not None and found and "/" not in before else root / parent
        self.extensions = (suffix.lower(),) if suffix else extensions
        self._form = re.compile(f"((?:.*/)?){re.escape(prefix)}([^/]+){re.escape(after.removesuffix(suffix))}")

    def stem(self, name: str) -> str | None:
        """What stands for {stem} in the name of a file below the folder; None if it does not fit the pattern."""
        found = self._form.fullmatch(os.path.splitext(name)[0])  # noqa: PTH122 - of many
        return found and found[1] + found[2]


class ImageMaskPairs:
    """Finds the mask of each image and writes both into an index."""

    def __init__(
        self,
        builder: IndexBuilder,
        root: Path,
        images: str,
        masks: str,
        extensions: Sequence[str] | None,
        inside: Path | None,
    ) -> None:
        self._builder, self._root, self._inside = builder, root, inside
        suffixes = tuple(extension.lower() for extension in extensions) if extensions else EXTENSIONS
        self._images = _Pattern("images", images, root, None, suffixes)
        self._masks = _Pattern("masks", masks, root, self._images.folder, MASK_EXTENSIONS)
        is_shared = os.path.realpath(self._images.folder) == os.path.realpath(self._masks.folder)
        if is_shared and not self._images.is_named and not self._masks.is_named:  # only extensions tell them apart
            self._masks.extensions = (".png", ".bmp")
            self._images.extensions = suffixes if extensions else (".jpg", ".jpeg")
        self._excluded = self._masks if is_shared and self._masks.is_named else None

    def find_all(self) -> list[tuple[bytes, bytes]]:
        """All images with their masks, in the order of their names."""
        images, masks = self._stems()
        absent = sorted(images.keys() - masks)
        if absent:
            raise DataError(self._no_masks(absent, images, masks))
        spare = sorted(masks[stem] for stem in masks.keys() - images)
        if spare:
            found = f"{pluralize(len(spare), 'mask')} without an image in {self._images.folder}"
            self._builder.note(f"{found}, not used: {join_first(spare, _MAX_NAMES)}")
        return [(os.fsencode(images[stem]), os.fsencode(masks[stem])) for stem in sorted(images)]

    def _no_masks(self, absent: list[str], images: dict[str, str], masks: dict[str, str]) -> str:
        """What to say about images without a mask: a few names of either side, and the pattern that would match."""
        names = [PurePosixPath(images[stem]).name for stem in absent]
        found = f"no mask in {self._masks.folder} for {len(absent):,} of {len(images):,} images"
        if len(absent) < len(images):
            return (
                f"{found}: {join_first(names, _MAX_NAMES)}; add them, or list the images that have one as `list_file`"
            )
        there = sorted(self._files(self._masks.folder, MASK_EXTENSIONS))
        others = join_first([PurePosixPath(name).name for name in there], 2) or "none"
        found = f"{found}: images are called {join_first(names, 2)}, masks {others}"
        below = os.path.relpath(self._masks.folder, self._root)
        if pattern := _matching_pattern(sorted(images), there):
            return f'{found}; add `masks: "{below}/{pattern}"`'
        return f'{found}; name masks after their images, or give a pattern, as in `masks: "{below}/{_STEM}_mask.png"`'

    def read_list(self, list_file: Path) -> list[tuple[bytes, bytes]]:
        """The images that a list names, in its order, with the masks beside them or of the same name."""
        if not list_file.is_file():
            found = f"{list_file}: {why_no_file(list_file)}"
            raise DataError(f"{found}; `list_file` is looked for in `root`, {self._root}: correct either")
        self._builder.watch(list_file, by_content=True)
        columns = Columns(label_key="mask", has_keys=False)
        rows = list(read_list(list_file, columns, self._builder.facts["notes"]))
        if not rows:
            raise DataError(f"{list_file}: the list is empty; expected a line for each image")
        self._builder.append("line", np.array([row.line for row in rows]))
        pairs = self._by_name(list_file, rows) if rows[0].label is None else self._by_column(list_file, rows)
        encoded = partial(encode_name, list_file)
        lines = zip((row.line for row in rows), pairs, strict=True)
        return [(encoded(line, image), encoded(line, mask)) for line, (image, mask) in lines]

    def _by_name(self, list_file: Path, rows: Sequence[Row]) -> list[tuple[str, str]]:
        images, masks = self._stems()
        stems = [row.name if row.name in images else os.path.splitext(row.name)[0] for row in rows]  # noqa: PTH122
        for files, what in ((images, f"image in {self._images.folder}"), (masks, f"mask in {self._masks.folder}")):
            absent = [
                f"{row.name} (line {row.line})" for row, stem in zip(rows, stems, strict=True) if stem not in files
            ]
            if absent and files is masks and len(absent) == len(rows):
                raise DataError(f"{list_file}: {self._no_masks(stems, {stem: images[stem] for stem in stems}, masks)}")
            if absent:
                advice = delimiter_hint([rows[0].name], has_keys=False) or "add the files, or remove the lines"
                number = f"{len(absent):,} of {len(rows):,} names"
                raise DataError(f"{list_file}: no {what} for {number}: {join_first(absent, _MAX_NAMES)}; {advice}")
        return [(images[stem], masks[stem]) for stem in stems]

    def _by_column(self, list_file: Path, rows: Sequence[Row]) -> list[tuple[str, str]]:
        wrong = next((row for row in rows if not isinstance(row.label, str) or not row.label.strip()), None)
        if wrong is not None:
            raise DataError(f"{at_line(list_file, wrong.line)}: {wrong.label!r} is not the name of a mask")
        pairs = [(row.name, row.label.strip()) for row in rows]
        for folder in sorted({os.path.dirname(name) for pair in pairs for name in pair}):  # noqa: PTH120 - of many
            with suppress(OSError, ValueError):  # else its files are absent
                self._builder.watch(self._root / folder)
        named = [(name, row.line) for row, pair in zip(rows, pairs, strict=True) for name in pair]
        absent = [f"{name} (line {line})" for name, line in named if not os.path.exists(self._root / name)]  # noqa: PTH110
        if absent:
            found = f"{len(absent):,} of the {len(named):,} files that it names are not in {self._root}"
            raise DataError(f"{list_file}: {found}: {join_first(absent, _MAX_NAMES)}; add them, or remove their lines")
        return pairs

    def _stems(self) -> tuple[dict[str, str], dict[str, str]]:
        """The images and the masks, as paths below the root, by what stands for {stem} in their names."""
        images, masks = self._by_stem(self._images, self._excluded), self._by_stem(self._masks, None)
        if not images:
            expected = f"expected files with the extensions {' '.join(self._images.extensions)}"
            raise DataError(f"{self._images.folder}: no images in this folder; {expected}")
        return images, masks

    def _by_stem(self, pattern: _Pattern, excluded: _Pattern | None) -> dict[str, str]:
        found: dict[str, str] = {}
        below = os.path.relpath(pattern.folder, self._root)
        for name in self._files(pattern.folder, pattern.extensions):
            is_excluded = excluded is not None and name.lower().endswith(excluded.extensions) and excluded.stem(name)
            stem = None if is_excluded else pattern.stem(name)
            if stem is None:
                continue
            if stem in found:
                raise DataError(
                    f"{pattern.folder}: {PurePosixPath(found[stem]).name} and {name} have the same name but for their"
                    " extensions; keep one, or give `extensions`"
                )
            found[stem] = f"{below}/{name}"
        return found

    def _files(self, folder: Path, extensions: tuple[str, ...]) -> Iterator[str]:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; give the folders of images and masks as `images` and `masks`")
        return files_below(folder, "", extensions, self._inside, self._builder.watch)


def _matching_pattern(stems: Sequence[str], masks: Sequence[str]) -> str:
    """The pattern by which most masks are named after an image; empty if none is."""
    counts = Counter[str]()
    for mask in masks[:_COMPARED]:
        for stem in stems[:_COMPARED]:
            before, found, after = mask.partition(stem)
            if found and "/" not in after:
                counts[f"{before}{_STEM}{after}"] += 1
    return counts.most_common(1)[0][0] if counts else ""
