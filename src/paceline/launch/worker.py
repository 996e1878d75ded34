"""A process that our launcher started: it exits with the launcher, and reports why it ends."""

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
from paceline.launch.failure import ExitRecord, mark_done


def run_as_worker(body: Callable[[], int], text: Callable[[PacelineError], str] = str) -> int:
    """Run the body and return its exit code; errors go to the launcher, which prints their text once for all."""
    launcher = Numbers(os.environ).get(LAUNCHER, 0, low=1)
    del os.environ[LAUNCHER]
    end_with_parent(launcher)
    share_folder(Path(os.environ[RECORDS]).parent)
    try:
        return _run(body)
    except PacelineError as error:
        report_exit(error.exit_code, text(error), explained=True)
        return error.exit_code
    except BrokenPipeError:  # as without a launcher; to start again would not bring the reader back
        report_exit(1, "whatever read the output has closed it", explained=True)
        os._exit(1)
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001 - the launcher prints it
        report_exit(1, traceback.format_exc(), explained=False)
        _flush()
        # Destroying a broken process group may abort the process, with another exit code.
        os._exit(1)
    finally:
        _flush()


def _run(body: Callable[[], int]) -> int:
    """Run the body and mark it as done, since libraries may abort while the interpreter exits."""
    code = body()
    _flush()
    if code == 0:
        with suppress(OSError):
            mark_done(Path(os.environ[RECORDS]), int(os.environ["RANK"]))
    return code


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def report_exit(code: int, message: str, explained: bool) -> None:
    """Report to the launcher why this process ends; `explained` if the message is for the user."""
    # Without the launcher the folder is gone.
    with suppress(OSError):
        record = ExitRecord(int(os.environ["RANK"]), code, message, explained, time.time())
        record.write(Path(os.environ[RECORDS]))
