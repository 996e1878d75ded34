"""Memory that is given back and taken again in every update, kept by the process instead."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names that mallopt has for them
_KEPT = 1 << 28


def keep_freed_memory() -> bool:
    """Have the C library keep up to 256 MB of freed memory; False where it cannot be told to.

    By default it returns large pieces to the system at once. The next activation or batch then gets fresh pages, each
    of which the system clears when it is first written to: a third of the time of a step of MobileNetV2 on a processor.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, _KEPT) for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
