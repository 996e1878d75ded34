"""Why a group of processes ended: what each reports on exit, which one failed first, and whether to restart.

A process that our launcher started exits with the launcher, and reports why it ends (`run_as_worker`).
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.atomic_write import replace_file
from paceline.core.errors import CheckpointError, DataError, PacelineError, Stopped, UsageError
from paceline.core.place import Numbers
from paceline.core.process import end_with_parent, flush_streams
from paceline.core.temporary import share_folder
from paceline.launch.environment import LAUNCHER, RECORDS

# These codes mean a mistake of the user's or a request to stop: a restart would end the same way.
_FINAL_CODES = {error.exit_code for error in (UsageError, DataError, CheckpointError, Stopped)}
_INTERRUPTED = 130
_TAIL_LINES = 20


@dataclass(frozen=True)
class ExitRecord:
    """Why a process ended; `explained` if the message is for the user, otherwise it is a traceback."""

    rank: int
    code: int
    message: str
    explained: bool
    time: float

    @property
    def summary(self) -> str:
        """The line with the error; a traceback ends with it."""
        lines = [line for line in self.message.splitlines() if line and not line.startswith(" ")]
        return lines[-1] if lines else f"exit code {self.code}"

    def as_text(self) -> str:
        """The record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ExitRecord:
        """The record that `as_text` wrote."""
        return cls(**json.loads(text))


def read_records(folder: Path) -> list[ExitRecord]:
    """The records in a folder, the earliest first."""
    found = [ExitRecord.from_text(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda record: record.time)


def is_done(folder: Path, rank: int) -> bool:
    """Whether a process has marked its work as done: a crash while it exits is no failure then."""
    return (folder / f"rank-{rank}.done").exists()


@dataclass(frozen=True)
class ExitedProcess:
    """A process, its exit code (negative: a signal; None: it had to be killed) and the file of its stderr."""

    rank: int
    code: int | None
    errors: Path


@dataclass(frozen=True)
class Failure:
    """The reason in one sentence, its details, and the exit code."""

    summary: str
    details: str = ""
    code: int = 1
    is_final: bool = False


def find_failure(
    ended: list[ExitedProcess],
    records: list[ExitRecord],
    stopped_by: signal.Signals | None,
    ask_peers: Callable[[], ExitRecord | None],
) -> Failure:
    """The first failure; failures of other processes that follow from it are left out."""
    explained = next((record for record in records if record.explained), None)
    if explained is None and not stopped_by:
        explained = ask_peers()
    if explained:
        return Failure(explained.message, code=explained.code, is_final=True)
    final = next((one for one in ended if one.code in _FINAL_CODES), None)
    if final and final.code:
        return Failure(f"process {final.rank} ended with exit code {final.code}", _tail(final), final.code, True)
    # A process that reported a crash was alive when the cause came; what killed it later is a consequence.
    crashed = {record.rank for record in records}
    killed = [one for one in ended if one.code is not None and one.code < 0 and one.rank not in crashed]
    if stopped_by and (killed or not records):
        summary = f"stopped by {stopped_by.name}; the same command resumes from the newest checkpoint"
        return Failure(summary, code=Stopped.exit_code, is_final=True)
    if killed:
        number = -(killed[0].code or 0)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return Failure(f"process {killed[0].rank} was killed by {name}", _tail(killed[0]), is_final=bool(stopped_by))
    return _crash(ended, records, is_final=bool(stopped_by))


def _crash(ended: list[ExitedProcess], records: list[ExitRecord], is_final: bool) -> Failure:
    if records:
        first = records[0]
        written = next((_tail(one) for one in ended if one.rank == first.rank), "")
        details = "\n".join(part for part in (written, first.message.rstrip()) if part)
        return Failure(f"process {first.rank} failed: {first.summary}", details, is_final=is_final)
    failed = next(one for one in ended if one.code)
    summary = f"process {failed.rank} ended with exit code {failed.code}"
    code = _INTERRUPTED if failed.code == _INTERRUPTED else 1
    return Failure(summary, _tail(failed), code, is_final or code == _INTERRUPTED)


def _tail(process: ExitedProcess) -> str:
    """The last lines of a process's stderr; empty for rank 0, which writes to the terminal."""
    if not process.errors.is_file():
        return ""
    text = process.errors.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


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
        flush_streams()
        # Destroying a broken process group may abort the process, with another exit code.
        os._exit(1)
    finally:
        flush_streams()


def _run(body: Callable[[], int]) -> int:
    """Run the body and mark it as done, since libraries may abort while the interpreter exits."""
    code = body()
    flush_streams()
    if code == 0:
        with suppress(OSError):
            (Path(os.environ[RECORDS]) / f"rank-{os.environ['RANK']}.done").touch()
    return code


def report_exit(code: int, message: str, explained: bool) -> None:
    """Report to the launcher why this process ends; `explained` if the message is for the user."""
    # Without the launcher the folder is gone.
    with suppress(OSError):
        record = ExitRecord(int(os.environ["RANK"]), code, message, explained, time.time())
        path = Path(os.environ[RECORDS]) / f"rank-{record.rank}.json"
        replace_file(path, record.as_text().encode(), is_durable=False)
