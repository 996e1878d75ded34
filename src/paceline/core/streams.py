"""Standard output and error that may be closed, or lose their terminal or pipe at any moment."""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Open those standard streams that the process was started without, on the null device.

    Their descriptors would otherwise go to the next files that are opened, and what libraries print into those.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free: this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - stays open as the stream it replaces
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def say(text: object) -> None:
    """Print a line on standard error; where nobody can read it any more, that is no reason to fail."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        settle()


def settle() -> None:
    """Write out what was printed; a stream that nobody reads any more leads to the null device from now on.

    Otherwise Python tries again when it ends, and fails with an exit code of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
        except ValueError:
            pass  # closed already
