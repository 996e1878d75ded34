"""The parts of a workbook looked through before it is opened: nothing huge, nothing that writing it would lose."""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from xml.parsers import expat

from paceline.core.errors import DataError

MAX_CELLS = 1_000_000
_MAX_UNPACKED = 1 << 26
_MAX_PARTS = 2_000
_MAX_ELEMENTS = 3 * MAX_CELLS
_LOST = (
    "xl/vbaProject", "xl/slicers/", "xl/slicerCaches/", "xl/timelines/", "xl/timelineCaches/", "xl/threadedComments/",
    "xl/richData/", "xl/metadata.xml", "xl/model/", "xl/connections.xml", "xl/queryTables/", "xl/ctrlProps/",
    "xl/activeX/", "xl/embeddings/", "xl/diagrams/", "xl/ink/", "xl/webextensions/",
)  # fmt: skip
_SHAPES = {"sp", "grpSp", "cxnSp"}
_EXPANDED = {"mergeCell", "hyperlink"}  # of these every cell is made when the workbook is read
_RANGE = re.compile(r"\$?([A-Za-z]{1,3})\$?(\d{1,7}):\$?([A-Za-z]{1,3})\$?(\d{1,7})")


def check_parts(path: Path, archive: zipfile.ZipFile) -> None:
    """A DataError unless the workbook is small, well-formed, and can be written again without loss."""
    parts = archive.infolist()
    unpacked = sum(part.file_size for part in parts)
    if len(parts) > _MAX_PARTS or unpacked > _MAX_UNPACKED:
        size = f"{len(parts):,} parts of {unpacked:,} bytes"
        raise DataError(f"{path}: unpacks to {size}, too much for a table of results; it stays as it is")
    reader = _Reader(path)
    for part in parts:
        if part.filename.startswith(_LOST):
            raise DataError(f"{path}: would lose {part.filename} if it were written; it stays as it is")
        try:
            content = archive.read(part)
            if part.filename.endswith((".xml", ".rels")):
                reader.read(part.filename, content)
        except (expat.ExpatError, zipfile.BadZipFile, zlib.error, LookupError, ValueError, OSError, EOFError) as error:
            raise DataError(f"{path}: is damaged: {part.filename}: {error}; it stays as it is") from error
        except (RuntimeError, NotImplementedError) as error:
            raise DataError(f"{path}: cannot be unpacked: {part.filename}: {error}; it stays as it is") from error


class _Reader:
    """Goes through xml without building anything of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, ""
        self.elements = self.cells = 0

    def read(self, part: str, content: bytes) -> None:
        self.part = part
        parser = expat.ParserCreate()
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        parser.StartElementHandler = self._start
        parser.Parse(content, True)

    def _refuse_doctype(self, *_: object) -> None:
        raise DataError(f"{self.path}: {self.part} has a DOCTYPE, which can make a small file huge; it stays as it is")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        name = tag.rpartition(":")[2]
        self.elements += 1
        if name in _EXPANDED:
            self.cells += _area(attributes.get("ref", ""))
        if self.elements > _MAX_ELEMENTS or self.cells > MAX_CELLS:
            raise DataError(f"{self.path}: {self.part} holds too much for a table of results; it stays as it is")
        if name in _SHAPES and self.part.startswith("xl/drawings/"):
            raise DataError(f"{self.path}: would lose the shapes of {self.part} if it were written; it stays as it is")


def _area(reference: str) -> int:
    found = _RANGE.fullmatch(reference)
    if found is None:
        return 1
    left, top, right, bottom = found.groups()
    return (abs(_column(right) - _column(left)) + 1) * (abs(int(bottom) - int(top)) + 1)


def _column(letters: str) -> int:
    number = 0
    for letter in letters.upper():
        number = number * 26 + ord(letter) - ord("A") + 1
    return number
