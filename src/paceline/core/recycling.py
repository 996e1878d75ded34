"""Memory for batches, used again as soon as nobody holds what was in it.

The system hands out fresh memory page by page and clears each; for a batch of floats that takes several times as long
as the arithmetic that fills it.
"""

from __future__ import annotations

import math
import sys
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LEAST_BYTES = 1 << 20  # what is smaller comes from memory that the process has already
_MOST_KEPT = 16
_HELD_BY_NOBODY = 3  # references that `_free` sees itself: the list's, its own variable, and the counting one's

_kept: list[NDArray[np.uint8]] = []
_lock = Lock()


def recycled(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array with anything in it. Its memory is taken again once this array, all views of it and all tensors made
    from it are gone, and not before.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < _LEAST_BYTES:
        return np.empty(shape, kind)
    with _lock:
        found = _free(size)
        if found is None:
            found = np.empty(size, np.uint8)  # numpy asks for large pages, torch does not
            if _make_room():
                _kept.append(found)
        return found.view(kind).reshape(shape)  # refers to what is kept, so that its being held can be seen


def _free(size: int | None) -> NDArray[np.uint8] | None:
    """A kept array of this many bytes, or of any size, that nobody holds."""
    for array in _kept:
        if sys.getrefcount(array) == _HELD_BY_NOBODY and size in (None, array.nbytes):
            return array
    return None


def _make_room() -> bool:
    """Whether one more may be kept, after one that is not needed was let go."""
    if len(_kept) >= _MOST_KEPT:
        unused = _free(None)
        if unused is None:
            return False
        _kept[:] = [array for array in _kept if array is not unused]
    return True
