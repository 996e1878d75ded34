"""Memory for batches, reused as soon as nothing refers to it.

The system hands out fresh memory page by page and clears each; for a batch of floats that takes several times as long
as the arithmetic that fills it.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LEAST_BYTES = 1 << 20  # what is smaller comes from memory that the process has already
_MOST_KEPT = 16


class _Memory(NamedTuple):
    array: NDArray[np.uint8]
    lent_as: type[ctypes.Array[ctypes.c_uint8]]  # kept, since making a type takes longer than all the rest


# Threads share it without a lock, which a thread that collects garbage while it holds it would wait for forever.
_free: deque[_Memory] = deque(maxlen=_MOST_KEPT)


def recycled(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array with anything in it. Its memory is taken again once this array, all views of it and all tensors made
    from it are gone, and not before.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < _LEAST_BYTES:
        return np.empty(shape, kind)
    memory = _take(size) or _Memory(np.empty(size, np.uint8), ctypes.c_uint8 * size)  # numpy asks for large pages
    # Whatever refers to the memory, in Python or in torch, keeps alive the one object that it was lent through.
    lent = memory.lent_as.from_buffer(memory.array.data)
    weakref.finalize(lent, _free.append, memory).atexit = False
    array: NDArray[Any] = np.frombuffer(memoryview(lent), kind)
    return array.reshape(shape)


def _take(size: int) -> _Memory | None:
    """Free memory of this many bytes, the most recently returned first."""
    for _ in range(len(_free)):
        try:
            memory = _free.pop()
        except IndexError:  # others were faster
            return None
        if memory.array.nbytes == size:
            return memory
        _free.appendleft(memory)
    return None
