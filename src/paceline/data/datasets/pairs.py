"""Images with a mask each, for segmentation and saliency."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.datasets.pairing import write_list, write_matches
from paceline.data.indexes.folders import refuse_escaping_file
from paceline.data.indexes.index import IndexBuilder, open_index
from paceline.data.indexes.line_numbers import find_line
from paceline.data.indexes.listing import at_line
from paceline.data.indexes.splits import read_part, split_arguments, write_parts
from paceline.data.reading.decode import MAX_PIXELS, Pixels
from paceline.data.reading.encoded import Encoded
from paceline.data.reading.mask_colours import Colours, PaintedClasses
from paceline.data.reading.masks import decode_grey, decode_ids, unknown_colours

_FAINTEST = 32  # a mask that is nowhere lighter, but not empty, holds ids rather than greys


class ImageMask:
    """Images in root/`images` and masks in root/`masks`, matched by their names without endings, at any depth.

    With `list_file`, in the root, only those that it names: a name a line, with or without an ending, or two columns
    of paths below the root, image and mask; those of a list that are not there are a DataError. A mask holds ids of
    `classes`, or `ignore_index` where nothing is known; any other value is a DataError, and so is a mask of another
    size than its image. With `colours`, one of each class, masks are painted; `ignore_index` is then any other colour.
    A `binary` mask is a grey image from 0, background, to 255. With `split_shares` the pairs are split by chance, and
    `split` is one part.
    """

    channels = 3

    def __init__(
        self,
        root: Path,
        images: str = "images",
        masks: str = "masks",
        list_file: str | None = None,
        classes: Sequence[str] | None = None,
        colours: Colours | None = None,
        ignore_index: int | None = None,
        binary: bool = False,
        extensions: Sequence[str] | None = None,
        split: str | None = None,
        split_shares: Mapping[str, float] | None = None,
        split_seed: int = 0,
        follow_links: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.root = root = Path(root)
        self.classes = ["foreground"] if binary else list(classes or [])
        self.ignore_index = ignore_index
        self.max_pixels = max_pixels
        self._painted = None if colours is None else PaintedClasses(colours, ignore_index)
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
            self.notes.append(f"ignore_index {ignore_index} is the id of {name!r}, which is left out of all figures")
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

    def unknown_colours(self, index: int) -> str:
        """The commonest colours of painted mask `index` that are of no class; empty if there is none."""
        return "" if self._painted is None else unknown_colours(self.mask_path(index), self.max_pixels, self._painted)

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
                raise DataError(f"{mask_path}: {found}; a binary mask is grey, from 0 to 255: {scaled}; {advice}")
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
