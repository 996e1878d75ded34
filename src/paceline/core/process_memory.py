"""Process-wide memory settings: the garbage collector during start-up, and malloc's handling of freed memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_waiting: list[bool] = []


@contextmanager
def kept_waiting() -> Iterator[None]:
    """Do without the collector inside, until `resume`: half a second less of importing torch."""
    if gc.isenabled():
        _waiting.append(True)
    gc.disable()
    try:
        yield
    finally:
        resume()


def resume() -> None:
    """Everything is imported and built: have the collector work again, on what is made from now on."""
    if _waiting:
        _waiting.clear()
        gc.freeze()
        gc.enable()


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names that mallopt has for them
_KEPT = 1 << 28
_LIMIT, _USED = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))


def keep_freed_memory() -> bool:
    """Have the C library keep up to 256 MB of freed memory; False where it cannot be told to.

    By default it returns large pieces to the system at once. The next activation or batch then gets fresh pages, each
    of which the system clears when it is first written to: a third of the time of a step of MobileNetV2 on a processor.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, _KEPT) for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))


def free_memory() -> int:
    """How many bytes may still be taken, of the machine and of this group of processes; no limit where none is told."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = sys.maxsize
    try:
        return min(available, int(_LIMIT.read_text(encoding="ascii")) - int(_USED.read_text(encoding="ascii")))
    except (OSError, ValueError):  # there is no limit, or none that can be read
        return available
