"""PASCAL VOC annotations: one XML file per image, and lists of names for the splits."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, ParseError, fromstring

from paceline.core.arguments import CountOrZero, KeyOf
from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.regular_file import first_file
from paceline.data.argument_types import ClassNames, Name, SplitShares
from paceline.data.datasets.detection import (
    BadBoxes,
    BoxObject,
    DetectionDataset,
    Problems,
    class_index,
    finite_or_nan,
    list_names,
    read_names,
    write_boxes,
)
from paceline.data.fingerprint import DataDigest
from paceline.data.index.folders import read_sizes
from paceline.data.index.index import IndexBuilder, open_index
from paceline.data.io.image import EXTENSIONS, read_bytes

MAX_BYTES = 1 << 24
"""Bytes of the largest annotation that is read: tens of thousands of objects."""
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


@register.dataset("voc", checks=[KeyOf("split", "split_shares")])
class Voc(DetectionDataset):
    """The images root/`images` that root/`image_sets`/<split>.txt names, with an XML file in root/`annotations` each.

    The list may also lie at root/<split>.txt; without a split all annotations are taken, in the order of their names,
    and with `split_shares` the split is drawn from them.
    Pixels are counted from 1 in the files and both corners are included, so a box from xmin to xmax spans xmin − 1 to
    xmax here; one that begins where it ends is taken as empty. Difficult objects are marked as `crowd`. Unless given,
    the classes are all names in the annotations, sorted, so that the splits agree on them.
    """

    def __init__(
        self,
        root: Path,
        split: Name | None = None,
        split_shares: SplitShares | None = None,
        split_seed: CountOrZero = 0,
        classes: ClassNames | None = None,
        bad_boxes: BadBoxes = "clip",
        follow_links: bool = False,
        images: Name = "JPEGImages",
        annotations: Name = "Annotations",
        image_sets: Name = "ImageSets/Main",
    ) -> None:
        root, folder = Path(root), Path(root, annotations)
        list_name = None if split_shares else split

        def build(builder: IndexBuilder) -> None:
            available = _stems(folder, builder)
            names = _split_names(root, root / image_sets, list_name, available, builder) if list_name else available
            objects = _read_objects(builder, folder, names, available, classes)
            files = _image_names(root / images, names, builder)
            builder.append_texts("file", [os.fsencode(name) for name in files])
            write_boxes(builder, objects, read_sizes([root / images / file for file in files], builder), bad_boxes)

        arguments: dict[str, Any] = {"folders": [images, annotations, image_sets], "split": list_name}
        arguments |= {"bad_boxes": bad_boxes, "classes": classes and list(classes)}
        index = open_index(root, "voc", arguments, build)
        inside = None if follow_links else root
        super().__init__(index, root / images, inside, folder, split, split_shares, split_seed)

    def update_digest(self, digest: DataDigest) -> None:
        """Add the names and sizes of the images to a fingerprint, and the content of the annotations."""
        images = list(self._files.names(self._part))
        digest.files(self._files.folder, images, "JPEGImages")
        annotations = [os.fsencode(f"{_stem(os.fsdecode(name))}.xml") for name in images]
        digest.files(self.annotations, annotations, "Annotations", by_content=True)


def _stems(folder: Path, builder: IndexBuilder) -> list[str]:
    expected = "a folder of XML files, one for each image; name it as `annotations`, and that of images as `images`"
    found = [name.removesuffix(".xml") for name in list_names(folder, builder, expected) if name.endswith(".xml")]
    if not found:
        raise DataError(f"{folder}: no XML files in it; expected {expected}")
    return found


def _split_names(root: Path, lists: Path, split: str, available: list[str], builder: IndexBuilder) -> list[str]:
    """The names in the list of a split, each found to have an annotation."""
    path = first_file([lists / f"{split}.txt", root / f"{split}.txt"])
    if path is None:
        there = ", ".join(sorted(each.stem for folder in (lists, root) for each in folder.glob("*.txt")))
        found = f"the lists are {there}" if there else "there are no lists: leave `split` out, or give `split_shares`"
        raise DataError(f"{lists / split}.txt: no such list, nor {root / split}.txt; {found}")
    return read_names(path, set(available), builder, "expected a name in each line", _stem)


def _stem(name: str) -> str:
    suffix = PurePosixPath(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in EXTENSIONS else name


def _image_names(folder: Path, names: list[str], builder: IndexBuilder) -> list[str]:
    """The file of each image: what is called like its annotation, whatever the kind of image."""
    there = list_names(folder, builder, "the images")
    by_stem = {_stem(each): each for each in reversed(there) if each.lower().endswith(EXTENSIONS)}
    return [by_stem.get(name, f"{name}.jpg") for name in names]


class _Object(NamedTuple):
    """An object as it is written: its corners are the numbers of pixels, counted from 1, both included."""

    place: str
    name: str
    corners: list[float]
    is_difficult: bool

    def box(self) -> list[float]:
        """The corners between pixels, counted from 0; one that ends where it begins, or before, stays so."""
        left, top, right, bottom = self.corners
        return [left - 1, top - 1, right, bottom] if left < right and top < bottom else self.corners


def _read_objects(
    builder: IndexBuilder, folder: Path, names: list[str], available: list[str], classes: Sequence[str] | None
) -> list[BoxObject]:
    """The objects of these annotations; all that is wrong with them is one DataError.

    All other annotations are asked for their classes unless these are given.
    """
    problems, found = Problems(folder), dict[str, list[_Object]]()
    for name in names if classes else [*names, *sorted(set(available).difference(names))]:
        builder.watch(folder / f"{name}.xml")
        found[name] = _read_xml(folder / f"{name}.xml", problems)
    problems.refuse("repair or remove them")
    numbers = class_index(folder, [(each.name, each.place) for of in found.values() for each in of], classes)
    builder.facts["classes"] = list(numbers)
    objects = []
    for image, name in enumerate(names):
        for each in found[name]:
            values = " ".join(f"{value:g}" for value in each.corners)
            place = f"{folder / each.place.replace(' object', ': object')} ({each.name}), {values}"
            objects.append(BoxObject(image, numbers[each.name], each.box(), place, each.is_difficult))
    return objects


def _read_xml(path: Path, problems: Problems) -> list[_Object]:
    """The objects in a file; what is missing in them, or is no number, is added to the problems."""
    objects = list[_Object]()
    try:
        root = _parse(path)
    except DataError as error:
        problems.add("not a VOC annotation", str(error).removeprefix(f"{path.parent}/"))
        return objects
    for number, element in enumerate(root.findall("object"), 1):
        place = f"{path.name} object {number}"
        name = (element.findtext("name") or "").strip()
        texts = {corner: (element.findtext(f"bndbox/{corner}") or "").strip() for corner in _CORNERS}
        corners = [finite_or_nan(text) for text in texts.values()]
        if not name:
            problems.add("no <name>", place)
        for (corner, text), value in zip(texts.items(), corners, strict=True):
            if math.isnan(value):
                problems.add(f"no number as <{corner}> of a <bndbox>", f"{place} ({text!r})" if text else place)
        objects.append(_Object(place, name, corners, (element.findtext("difficult") or "").strip() == "1"))
    return objects


def _parse(path: Path) -> Element:
    content = read_bytes(path)
    if len(content) > MAX_BYTES:
        raise DataError(f"{path}: {len(content):,} bytes; an annotation has at most {MAX_BYTES:,}")
    if b"<!DOCTYPE" in content.replace(b"\0", b""):  # of two bytes a character, too
        raise DataError(f"{path}: has a DOCTYPE, which is not read: it can make a small file huge; remove it")
    try:
        root = fromstring(content)
    except (ParseError, LookupError, ValueError) as error:
        raise DataError(f"{path}: not well-formed xml ({error})") from error
    if root.tag != "annotation":
        raise DataError(f"{path}: the outermost element is <{root.tag}>, expected <annotation>")
    return root
