"""The side of the process that our launcher started: it ends with its launcher, and tells it why it ends."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.place import Numbers
from paceline.core.process import end_with_parent
from paceline.core.temporary import share_folder
from paceline.launch.environment import LAUNCHER, RECORDS
from paceline.launch.exit_record import Record, note_done


def run_as_worker(body: Callable[[], int]) -> int:
    """Run the body and give its exit code; errors go to the launcher, which speaks for all processes."""
    launcher = Numbers(os.environ).get(LAUNCHER, 0, low=1)
    del os.environ[LAUNCHER]
    end_with_parent(launcher)
    share_folder(Path(os.environ[RECORDS]).parent)
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
