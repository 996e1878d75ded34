"""The annotation of one image in PASCAL VOC's xml, read without anything that xml could do beyond holding text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from paceline.core.errors import DataError
from paceline.data.reading.decode import read_bytes

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
