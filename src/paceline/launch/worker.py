"""The side of the process that our launcher started: it ends with its launcher, and tells it why it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.launch.environment import LAUNCHER, RECORDS
from paceline.launch.record import Record, note_done

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_SECONDS_BETWEEN_LOOKS = 0.5


def run_as_worker(body: Callable[[], int]) -> int:
    """Run the body and give its exit code; errors go to the launcher, which speaks for all processes."""
    live_with(int(os.environ.pop(LAUNCHER)))
    try:
        return _do(body)
    except PacelineError as error:
        tell(error.exit_code, str(error), explained=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001 - whatever it is, the launcher shows it
        tell(1, traceback.format_exc(), explained=False)
        _flush()
        # Taking a broken process group apart may abort the process, with noise and another exit code.
        os._exit(1)
    finally:
        _flush()


def _do(body: Callable[[], int]) -> int:
    """Run the body, and say when all is done: libraries that abort while the interpreter ends do not undo it."""
    code = body()
    _flush()
    if code == 0:
        with suppress(OSError):
            note_done(Path(os.environ[RECORDS]), int(os.environ["RANK"]))
    return code


def live_with(launcher: int) -> None:
    """Let this process be killed as soon as its launcher is gone, however that came about."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        is_set = library.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) == 0
    except (OSError, AttributeError):
        is_set = False
    # The launcher may have ended before the line above; from then on somebody else is the parent.
    if os.getppid() != launcher:
        os._exit(1)
    if not is_set:
        threading.Thread(target=_watch, args=(launcher,), name="launcher-watch", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def tell(code: int, message: str, explained: bool) -> None:
    """Tell the launcher why this process ends; `explained` if the message is for the user."""
    # The folder is gone if the launcher is: then nobody is left to be told.
    with suppress(OSError):
        record = Record(int(os.environ["RANK"]), code, message, explained, time.time())
        record.write(Path(os.environ[RECORDS]))
