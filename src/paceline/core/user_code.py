"""Errors in a user's own parts, named by part, file and line."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from paceline.core.contracts import relative_path
from paceline.core.errors import PacelineError, TrainingError
from paceline.core.world import is_communication_error

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<frozen")
_PYTHON = sysconfig.get_path("stdlib")


@contextmanager
def user_code(
    part: str, error_type: type[PacelineError] = TrainingError, note: Callable[[], str] = str
) -> Iterator[None]:
    """Surrounds a call of a user's part: what it raises names the part, and the line of the user's that it came from.

    `note` gives words to add to the message.

    What the machine is to blame for, memory or another process, is left as it is, since those who handle it look
    for it.
    """
    try:
        yield
    except Exception as error:
        # A field that a batch does not have, a KeyError, is the mistake of whoever asks for it.
        is_explained = isinstance(error, PacelineError) and not isinstance(error, KeyError)
        if is_explained or isinstance(error, torch.OutOfMemoryError | MemoryError) or is_communication_error(error):
            raise
        raise error_type(f"{part}: {described(error)}{note()}") from error


def own_code(part: str, written: object) -> AbstractContextManager[None]:
    """`user_code` around a call of what a user wrote; nothing around ours, whose errors show where they come from."""
    return nullcontext() if is_ours(type(written)) else user_code(f"{part} {type(written).__name__}")


def is_ours(written: object) -> bool:
    """Whether a class or function belongs to this package."""
    return str(getattr(getattr(written, "func", written), "__module__", "")).startswith("paceline.")


def described(error: Exception) -> str:
    """An error as `file:line: type: message`, by the last line that belongs to no library if there is one."""
    first_line = str(error).strip().split("\n")[0]
    message = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{relative_path(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return f"{relative_path(own[-1].filename)}:{own[-1].lineno}: {message}" if own else message


def _is_library(file: str) -> bool:
    """Whether a file is torch's, Python's or ours; what a user has installed counts as the user's."""
    return file.startswith(_LIBRARIES) or (file.startswith(_PYTHON) and "site-packages" not in file)
