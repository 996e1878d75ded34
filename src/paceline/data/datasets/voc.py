"""PASCAL VOC annotations: one XML file per image, and lists of names for the splits."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from paceline.core.arguments import Count, CountOrZero, KeyOf
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import first_file, open_regular
from paceline.data.argument_types import ClassNames, Name, SplitShares
from paceline.data.batch import Sample
from paceline.data.index.index import Arrays, Watch, as_bytes, from_bytes, kept_arrays
from paceline.data.io.image import EXTENSIONS, MAX_PIXELS, ImageFiles, packed_names, read_bytes
from paceline.data.objects import BadBoxes, Objects, at_most, check_boxes, drawn_part

if TYPE_CHECKING:
    from paceline.data.fingerprint import DataDigest


_ANY_SIZE = 1 << 30


@register.dataset("voc", checks=[KeyOf("split", "split_shares")])
class Voc:
    """The images root/JPEGImages/ that root/ImageSets/Main/<split>.txt names, and root/Annotations/ for each.

    The list may also lie at root/<split>.txt; without a split all annotations are taken, in the order of their names,
    and with `split_shares` the split is drawn from them.
    Pixels are counted from 1 in the files and both corners are included, so a box from xmin to xmax spans xmin − 1 to
    xmax here; one that begins where it ends is taken as empty. Difficult objects are marked as `crowd`. Unless given,
    the classes are all names in root/Annotations, sorted, so that the splits agree on them.
    """

    channels = 3

    def __init__(
        self,
        root: Path,
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        classes: ClassNames | None = None,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
        max_pixels: Count = MAX_PIXELS,
    ) -> None:
        root = Path(root)
        listed = None if split_shares else split
        made = {"split": listed, "classes": classes and list(classes), "bad_boxes": bad_boxes, "links": follow_links}

        def make(watch: Watch) -> Arrays:
            return _arrays(root, listed, classes, bad_boxes, follow_links, watch)

        arrays = kept_arrays(root, "voc", made, make)
        facts = from_bytes(arrays["facts"])
        self.classes: list[str] = facts["classes"]
        self.notes: list[str] = facts["notes"]
        self._objects = Objects(arrays)
        names = arrays["names"], arrays["name_ends"]
        self._files = ImageFiles(root, root / "JPEGImages", *names, follow_links, max_pixels)
        self._rows = drawn_part(len(self._files), split, split_shares, split_seed)

    def __len__(self) -> int:
        return len(self._rows)

    def path(self, index: int) -> Path:
        """The file of image `index`."""
        return self._files.path(int(self._rows[index]))

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and what the annotations hold."""
        images = self._files.names(self._rows)
        digest.files(self._files.folder, images, "JPEGImages")
        annotations = [os.fsencode(f"{_without_extension(os.fsdecode(name))}.xml") for name in images]
        digest.files(self._files.root / "Annotations", annotations, "Annotations", by_content=True)

    def open(self, index: int) -> Sample:
        """The image, not decoded yet, its size, and the boxes, classes, difficulty and areas of its objects."""
        row = int(self._rows[index])
        image = self._files.open(row)
        return {"image": image, **self._objects.fields(row), "size": np.array([image.height, image.width])}

    def read(self, index: int) -> Sample:
        """The same with the image decoded, uint8 [H, W, 3]."""
        sample = self.open(index)
        return {**sample, "image": sample["image"].decode()}


def _arrays(
    root: Path, split: str | None, classes: Sequence[str] | None, bad_boxes: BadBoxes, follow_links: bool, watch: Watch
) -> Arrays:
    """All that is taken from the files of a split, checked."""
    folder, images = root / "Annotations", root / "JPEGImages"
    available = _stems(folder, watch)
    names = _split_names(root, split, available, watch) if split else available

    def annotation(name: str) -> VocAnnotation:
        watch(folder / f"{name}.xml")
        return read_voc_xml(folder / f"{name}.xml")

    annotations = [annotation(name) for name in names]
    others = [] if classes else [annotation(name) for name in sorted(set(available).difference(names))]
    known = list(classes or _classes(folder, [*annotations, *others]))
    _check_names(folder, names, annotations, known)
    packed = packed_names(images, _image_names(images, names, annotations, watch))
    sizes, notes = _sizes(folder, names, annotations, ImageFiles(root, images, *packed, follow_links), watch)
    arrays, more = _objects(folder, names, annotations, sizes, known, bad_boxes)
    facts = as_bytes({"classes": known, "notes": [*notes, *more]})
    return arrays | {"names": packed[0], "name_ends": packed[1], "facts": facts}


def _stems(folder: Path, watch: Watch) -> list[str]:
    try:
        if folder.is_dir():
            watch(folder)
        found = sorted(name.removesuffix(".xml") for name in os.listdir(folder) if name.endswith(".xml"))  # noqa: PTH208
    except OSError as error:
        expected = "expected the folders Annotations (xml files) and JPEGImages (images) in `root`"
        raise DataError(f"{folder}: cannot be listed ({error.strerror}); {expected}") from error
    if not found:
        raise DataError(f"{folder}: no xml files in it; expected one for each image")
    return found


def _split_names(root: Path, split: str, available: list[str], watch: Watch) -> list[str]:
    """The names in the list of a split, each found to have an annotation."""
    places = [root / "ImageSets" / "Main" / f"{split}.txt", root / f"{split}.txt"]
    path = first_file(places)
    if path is None:
        there = sorted(each.stem for folder in (places[0].parent, root) for each in folder.glob("*.txt"))
        lists = f"; there are the lists {', '.join(there)}" if there else ""
        raise DataError(f"{places[0]}: no such list, nor {places[1]}{lists}")
    watch(path)
    try:
        with open_regular(path) as file:
            lines = file.read().decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as text ({getattr(error, 'strerror', None) or error})") from error
    known = set(available)
    names = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = _without_extension(line.strip())
        if name not in known:
            expected = f"expected one name in each line, such as {available[0]}"
            raise DataError(f"{path}: line {number} names {name!r}, but there is no Annotations/{name}.xml; {expected}")
        names.append(name)
    if not names:
        raise DataError(f"{path}: names no images")
    return names


def _without_extension(name: str) -> str:
    suffix = PurePosixPath(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in EXTENSIONS else name


def _classes(folder: Path, annotations: list[VocAnnotation]) -> list[str]:
    found = sorted({each.name for annotation in annotations for each in annotation.objects})
    if not found:
        raise DataError(f"{folder}: no annotation has an object, so the classes are not known; give them as `classes`")
    return found


def _check_names(folder: Path, names: list[str], annotations: list[VocAnnotation], classes: list[str]) -> None:
    known = set(classes)
    for name, annotation in zip(names, annotations, strict=True):
        for number, each in enumerate(annotation.objects, 1):
            if each.name not in known:
                place = f"{folder / name}.xml: object {number}"
                raise DataError(f"{place} is of class {each.name!r}, but `classes` has {', '.join(classes)}")


def _image_names(folder: Path, names: list[str], annotations: list[VocAnnotation], watch: Watch) -> list[str]:
    """The file of each image: what is called like its annotation, whatever the kind of image."""
    try:
        if folder.is_dir():
            watch(folder)
        there = sorted(os.listdir(folder), reverse=True)  # noqa: PTH208 - names are all that is needed
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror}); expected the images") from error
    by_stem = {_without_extension(each): each for each in there if each.lower().endswith(EXTENSIONS)}
    known = set(by_stem.values())
    found = []
    for name, annotation in zip(names, annotations, strict=True):
        is_there = annotation.filename in known and _without_extension(annotation.filename) == name
        found.append(annotation.filename if is_there else by_stem.get(name, f"{name}.jpg"))
    return found


def _sizes(
    folder: Path, names: list[str], annotations: list[VocAnnotation], files: ImageFiles, watch: Watch
) -> tuple[NDArray[np.int64], list[str]]:
    """The height and width of each image as it is, [N, 2], and where the annotations say something else."""
    sizes = np.full((len(names), 2), _ANY_SIZE, np.int64)
    notes = []
    for index, (name, annotation) in enumerate(zip(names, annotations, strict=True)):
        written = (annotation.height, annotation.width) if annotation.height and annotation.width else None
        try:
            watch(files.path(index))
            image = files.open(index)
        except DataError:  # told when the sample is read, where it may be left out
            sizes[index] = written or sizes[index]
            continue
        sizes[index] = image.height, image.width
        if written and written != (image.height, image.width):
            real = f"{image.width}×{image.height}"
            notes.append(f"{folder / name}.xml: says {written[1]}×{written[0]}, but the image is {real}, which counts")
    return sizes, at_most(notes, len(notes))


def _objects(
    folder: Path,
    names: list[str],
    annotations: list[VocAnnotation],
    sizes: NDArray[np.int64],
    classes: list[str],
    bad_boxes: BadBoxes,
) -> tuple[Arrays, list[str]]:
    numbers = {name: number for number, name in enumerate(classes)}
    written = [each for annotation in annotations for each in annotation.objects]
    images = np.repeat(np.arange(len(names)), [len(annotation.objects) for annotation in annotations])
    corners = np.array([each.corners for each in written], np.float64).reshape(-1, 4)

    def place(box: int) -> str:
        number = box - int(np.searchsorted(images, images[box])) + 1
        shown = " ".join(f"{value:g}" for value in corners[box])
        return f"{folder / names[images[box]]}.xml: object {number} ({written[box].name}), {shown}"

    extents = corners[:, 2:] - corners[:, :2]
    boxes, kept, notes = check_boxes(corners - (1, 1, 0, 0), extents, sizes[images], bad_boxes, place)
    labels = np.array([numbers[each.name] for each in written], np.int64)[kept]
    is_difficult = np.array([each.is_difficult for each in written], np.bool_)[kept]
    return Objects.arrays(len(names), images[kept], boxes, labels, is_difficult), notes


MAX_BYTES = 1 << 24
"""Bytes of the largest annotation that is read: tens of thousands of objects."""
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class VocObject(NamedTuple):
    """An object as it is written: its corners are the numbers of pixels, counted from 1, both included."""

    name: str
    corners: tuple[float, ...]
    is_difficult: bool


class VocAnnotation(NamedTuple):
    """What the file says of an image; height and width are 0 where it says nothing."""

    filename: str
    height: int
    width: int
    objects: list[VocObject]


def read_voc_xml(path: Path) -> VocAnnotation:
    """The annotation in a file; what is missing in it, or is no number, is a DataError that names the object."""
    root = _parse(path)
    if root.tag != "annotation":
        raise DataError(f"{path}: the outermost element is <{root.tag}>, expected <annotation>")
    objects = [_object(path, number, each) for number, each in enumerate(root.findall("object"), 1)]
    filename = (root.findtext("filename") or "").strip()
    return VocAnnotation(filename, _length(root, "size/height"), _length(root, "size/width"), objects)


def _parse(path: Path) -> Element:
    try:
        size = path.stat().st_size
    except (OSError, ValueError):
        size = 0  # reading it says what is wrong
    if size > MAX_BYTES:
        raise DataError(f"{path}: {size:,} bytes; an annotation has at most {MAX_BYTES:,}")

    def refuse(*_: object) -> None:
        raise DataError(f"{path}: has a DOCTYPE, which is not read: it can make a small file huge; remove it")

    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(read_bytes(path), True)
    except (expat.ExpatError, LookupError, ValueError) as error:
        raise DataError(f"{path}: not well-formed xml ({error})") from error
    return builder.close()


def _object(path: Path, number: int, element: Element) -> VocObject:
    name = (element.findtext("name") or "").strip()
    if not name:
        raise DataError(f"{path}: object {number} has no <name>")
    corners = tuple(_corner(path, number, element, corner) for corner in _CORNERS)
    return VocObject(name, corners, (element.findtext("difficult") or "").strip() == "1")


def _corner(path: Path, number: int, element: Element, corner: str) -> float:
    text = element.findtext(f"bndbox/{corner}")
    if text is None:
        raise DataError(f"{path}: object {number} has no <{corner}> in a <bndbox>")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}: object {number} has {text.strip()!r} as its <{corner}>, expected a number")
    return value


def _length(root: Element, place: str) -> int:
    text = (root.findtext(place) or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
