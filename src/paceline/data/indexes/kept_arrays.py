"""Arrays that take long to make from many files or a large one, kept in an index and mapped into memory from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.indexes.index import IndexBuilder, open_index

Arrays = dict[str, NDArray[Any]]
Watch = Callable[[Path], None]


def kept_arrays(folder: Path, kind: str, arguments: Mapping[str, Any], make: Callable[[Watch], Arrays]) -> Arrays:
    """What `make` gives for the data in `folder`, from the index of an earlier time if that is still true.

    `make` is given a function that it calls with each file and folder before it looks into it. The arrays may not be
    written to; those of whole numbers may come back in a smaller type.
    """

    def build(builder: IndexBuilder) -> None:
        def watch(path: Path) -> None:
            try:
                builder.watch(path)
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror})") from error

        made = make(watch)
        for name, values in made.items():
            builder.numbers(name, values.ravel())
        builder.texts("arrays", [json.dumps([name, *values.shape]).encode() for name, values in made.items()])

    index = open_index(folder, kind, arguments, build)
    described = [json.loads(text) for text in index.texts("arrays")]
    return {name: index.numbers(name).reshape(shape) for name, *shape in described}


def as_bytes(value: Any) -> NDArray[np.uint8]:
    """Anything that JSON can hold, to be kept as an array."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def from_bytes(values: NDArray[np.uint8]) -> Any:
    """What `as_bytes` was given."""
    return json.loads(values.tobytes())


def joined(parts: Iterable[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Texts in one array, and where each of them ends."""
    listed = list(parts)
    return np.frombuffer(b"".join(listed), np.uint8), np.cumsum([len(part) for part in listed], dtype=np.int64)
