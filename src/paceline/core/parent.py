"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_SECONDS_BETWEEN_LOOKS = 0.5


def end_with(parent: int) -> None:
    """Let this process be killed as soon as its parent is gone, however that came about.

    On Linux that is when the thread of the parent ends that started this process: it should be the main thread.
    """
    try:
        library = ctypes.CDLL(None, use_errno=True)
        is_set = library.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) == 0
    except (OSError, AttributeError):
        is_set = False
    # The parent may have ended before the line above; from then on somebody else is it.
    if os.getppid() != parent:
        os._exit(1)
    if not is_set:
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGKILL)
