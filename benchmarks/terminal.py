"""A terminal that nobody looks at: a real one for the program, so that it draws its progress."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

_ROWS, _COLUMNS = 40, 120


@contextmanager
def on_terminal() -> Iterator[None]:
    """Have standard output and error go to a pseudo-terminal, which another process reads as a terminal would."""
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    os.environ["TERM"] = "xterm-256color"
    with (
        subprocess.Popen(["cat"], stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
        os.fdopen(writing, "w", encoding="utf-8") as stream,
        redirect_stdout(stream),
        redirect_stderr(stream),
    ):
        os.close(reading)
        yield
