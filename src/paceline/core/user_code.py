"""Errors in a user's own parts, named by part, file and line."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from paceline.core.contracts import relative_path
from paceline.core.errors import ArgumentError, PacelineError, RecipeError, TrainingError, naming_full_disks
from paceline.core.process import flush_streams, print_error
from paceline.core.registry import register
from paceline.core.world import is_communication_error

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<frozen")
_PYTHON = sysconfig.get_path("stdlib")


@contextmanager
def user_code(
    part: str, error_type: type[PacelineError] = TrainingError, note: Callable[[], str] = str
) -> Iterator[None]:
    """Surrounds a call of a user's part whose name in the recipe is known: what it raises names part, file and line.

    `note` gives words to add to the message. What the machine is to blame for, memory or another process, is left as it
    is, since those who handle it look for it.
    """
    try:
        yield
    except Exception as error:
        if _is_handled(error):
            raise
        raise error_type(f"{part}: {described(error)}{note()}") from error


@contextmanager
def named_errors() -> Iterator[None]:
    """Surrounds whatever may call a user's parts: an error that passed through a line of the user's names that line.

    It also names what was called, as in `parts.py:12: RuntimeError: no rows; Paceline was calling Net.forward`. Other
    errors keep their traceback: they are ours.
    """
    try:
        yield
    except Exception as error:
        if named := named_error(error):
            raise named from error
        raise


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Surrounds a script: errors that explain themselves end it as they end a command, in one line with its exit code.

    Mistakes in the script's own code keep their traceback.
    """
    try:
        with naming_full_disks():
            yield
    except (PacelineError, ArgumentError) as error:
        if isinstance(error, TrainingError) and error.__cause__:
            raise
        flush_streams()
        print_error(described(error) if isinstance(error, ArgumentError) else error)
        sys.exit(getattr(error, "exit_code", RecipeError.exit_code))
    except KeyboardInterrupt:
        print_error("interrupted")
        sys.exit(130)
    finally:
        flush_streams()


def named_error(error: Exception, error_type: type[PacelineError] = TrainingError) -> PacelineError | None:
    """The error that names a user's line, if another error passed through one."""
    own = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if is_own(frame)]
    if not own or _is_handled(error):
        return None
    called, failed = (frame.f_code.co_qualname.replace("<locals>.", "") for frame in (own[0], own[-1]))
    where = f"Paceline was calling {called}" + f", the error is in {failed}" * (failed != called)
    return error_type(f"{described(error)}; {where} (--traceback prints every line)")


def _is_handled(error: Exception) -> bool:
    """Whether an error is explained already, or one of the machine or of another process."""
    # A field that a batch does not have, a KeyError, is the mistake of whoever asks for it.
    is_explained = isinstance(error, PacelineError) and not isinstance(error, KeyError)
    of_machine = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | MemoryError)
    return is_explained or of_machine or is_communication_error(error)


def is_own(frame: FrameType) -> bool:
    """Whether a frame runs a user's code: a file that is not installed, or a package that registered a part."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    if file.startswith("<") or _is_library(file):
        return False
    if "site-packages" not in file and "dist-packages" not in file:
        return True
    parts = [part.target for kind in register.kinds.values() for part in kind if callable(part.target)]
    return module.partition(".")[0] in {part.__module__.partition(".")[0] for part in parts}


def is_ours(written: object) -> bool:
    """Whether a class or function belongs to this package."""
    return str(getattr(getattr(written, "func", written), "__module__", "")).startswith("paceline.")


def described(error: Exception) -> str:
    """An error as `file:line: type: message`, by the last line that is the user's, else of what the user installed.

    Errors of ours explain themselves: their type is left out.
    """
    first_line = str(error).strip().split("\n")[0]
    is_explained = isinstance(error, PacelineError | ArgumentError) and not isinstance(error, KeyError)
    message = first_line if first_line and is_explained else f"{type(error).__name__}: {first_line}".removesuffix(": ")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{relative_path(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    places = list(traceback.walk_tb(error.__traceback__))
    installed = [place for place in places if not _is_library(place[0].f_code.co_filename)]
    own = [place for place in installed if is_own(place[0])] or installed
    if not own:
        return message
    frame, line = own[-1]
    return f"{relative_path(frame.f_code.co_filename)}:{line}: {message}"


def _is_library(file: str) -> bool:
    """Whether a file is torch's, Python's or ours; what a user has installed counts as the user's."""
    return file.startswith(_LIBRARIES) or (file.startswith(_PYTHON) and "site-packages" not in file)
