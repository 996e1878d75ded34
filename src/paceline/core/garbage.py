"""Starting without garbage collection: imports make many objects that stay, and looking through them takes long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

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
