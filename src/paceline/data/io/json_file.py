"""JSON files of annotations: read at once, or, where long lists would not fit into memory, in pieces."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular

_BLOCK = 1 << 24
_BLANK = b" \t\r\n"
_LIST = ord("[")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_QUOTE = 2
_KINDS = np.zeros(256, np.int8)  # 1 opens, -1 closes
_KINDS[list(b'[{]}"')] = 1, 1, -1, -1, _QUOTE
_IS_SPECIAL = _KINDS != 0


def read_json(path: Path) -> Any:
    """What a JSON file holds; one missing or damaged is a DataError."""
    with json_errors(path), open_regular(path) as file:
        return json.loads(file.read())


@contextmanager
def json_errors(path: Path) -> Iterator[None]:
    """Re-raise what goes wrong while a JSON file is read as a DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON, or damaged ({error})") from error
    except MemoryError as error:
        size = f"{path.stat().st_size / 1e9:.1f} GB"
        advice = "divide it, or read it on a machine with more memory"
        raise DataError(f"{path}: its {size} need more memory than there is; {advice}") from error


class JsonLists:
    """A JSON file whose outermost object holds long lists, which are read in pieces of about 16 MB.

    `content` is all but the items of these lists. Whoever reads every piece has checked the whole file.
    """

    def __init__(self, file: BinaryIO) -> None:
        encoding = json.detect_encoding(file.read(4))
        if not encoding.startswith("utf-8"):
            file.seek(0)
            file = io.BytesIO(file.read().decode(encoding).encode("utf-8", "surrogatepass"))
        self._file, self._spans = file, _find_lists(file)
        bounds = [0, *(bound for span in self._spans for bound in (span[0], span[-1])), file.seek(0, io.SEEK_END)]
        texts = [self._read(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
        texts[:-1] = [text + b"%d" % number for number, text in enumerate(texts[:-1])]
        self.content: Any = _parse(texts, bounds[::2])
        """The outermost value; each list directly in it has its number as the only item."""

    def pieces(self, key: str) -> Iterator[tuple[bytes, int]]:
        """The items of a list of the outermost object as shorter lists in JSON, and the byte where each begins."""
        span = self._spans[self.content[key][0]]
        for start, end in pairwise(span):
            items = self._read(start, end)
            if start != span[0]:
                items = items.lstrip(_BLANK)
                if not items and end == span[-1]:
                    return
                if not items.startswith(b",") or not items[1:].strip(_BLANK):
                    raise ValueError(f"expected a comma and an item at byte {start:,}")
                items = items[1:]
            yield b"[" + items + b"]", end - len(items) - 1

    def _read(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)


def parse_piece(piece: bytes, start: int) -> Any:
    """What a piece holds; a ValueError tells the byte of the file."""
    return _parse([piece], [start])


def _parse(texts: list[bytes], starts: list[int]) -> Any:
    """What texts hold together, each of which begins at some byte of the file."""
    try:
        return json.loads(b"".join(texts))
    except json.JSONDecodeError as error:
        ends = np.cumsum([len(text) for text in texts])
        number = int(np.searchsorted(ends, error.pos, side="right").clip(max=len(texts) - 1))
        place = starts[number] + len(texts[number]) - (int(ends[number]) - error.pos)
        raise ValueError(f"{error.msg} at byte {place:,}") from error


def _find_lists(file: BinaryIO) -> list[list[int]]:
    """Of each list in the outermost object: where its items begin, where they can be divided, and where they end."""
    spans: list[list[int]] = []
    begin, depth, in_text, in_list = 0, 0, False, False
    file.seek(0)
    while block := file.read(_BLOCK):
        while block.endswith(b"\\") and (more := file.read(1)):  # so that no escape is in two blocks
            block += more
        places, steps, in_text = _brackets(block, in_text)
        depths = depth + np.cumsum(steps, dtype=np.int64)
        for index in np.flatnonzero(((depths == 2) & (steps > 0)) | ((depths == 1) & (steps < 0))).tolist():
            place = int(places[index])
            if in_list:
                spans[-1].append(begin + place)
            in_list = block[place] == _LIST
            if in_list:
                spans.append([begin + place + 1])
        items = places[(depths == 2) & (steps < 0)]
        if in_list and len(items) and begin + int(items[-1]) >= spans[-1][-1]:
            spans[-1].append(begin + int(items[-1]) + 1)
        depth = int(depths[-1]) if len(depths) else depth
        begin += len(block)
    if depth > 0:
        raise ValueError(f"ends after {begin:,} bytes, before all brackets are closed")
    return spans


def _brackets(block: bytes, in_text: bool) -> tuple[NDArray[np.int64], NDArray[np.int8], bool]:
    """Where brackets outside of texts are, 1 for each that opens and -1 that closes, and whether a text goes on."""
    data = np.frombuffer(_ESCAPE.sub(b"..", block), np.uint8)
    places = np.flatnonzero(_IS_SPECIAL[data])
    kinds = _KINDS[data[places]]
    num_quotes = np.cumsum(kinds == _QUOTE) + in_text
    outside = (kinds != _QUOTE) & (num_quotes % 2 == 0)
    return places[outside], kinds[outside], bool(num_quotes[-1] % 2) if len(places) else in_text
