"""What the end of a group of processes means: which of them is to blame, and whether to begin again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import CheckpointError, DataError, Stopped, UsageError
from paceline.launch.exit_record import Record

# A process that ends so has found a mistake of the user's, or was asked to stop: again would be the same.
_FINAL_CODES = {error.exit_code for error in (UsageError, DataError, CheckpointError, Stopped)}
_INTERRUPTED = 130
_TAIL_LINES = 20


@dataclass(frozen=True)
class Ended:
    """A process with its exit code (negative: a signal; None: it had to be killed) and what it wrote as errors."""

    rank: int
    code: int | None
    errors: Path


@dataclass(frozen=True)
class Failure:
    """The reason in a sentence, all that is known of it, and the exit code that it means."""

    summary: str
    details: str = ""
    code: int = 1
    is_final: bool = False


def judge(
    ended: list[Ended],
    records: list[Record],
    stopped_by: signal.Signals | None,
    ask_peers: Callable[[], Record | None],
) -> Failure:
    """The failure that came first; what others died of in consequence is left out."""
    explained = next((record for record in records if record.explained), None)
    if explained is None and not stopped_by:
        explained = ask_peers()
    if explained:
        return Failure(explained.message, code=explained.code, is_final=True)
    final = next((one for one in ended if one.code in _FINAL_CODES), None)
    if final and final.code:
        return Failure(f"process {final.rank} ended with exit code {final.code}", _tail(final), final.code, True)
    # One that has told of a crash was alive when the reason came; what killed it later is a consequence.
    crashed = {record.rank for record in records}
    killed = [one for one in ended if one.code is not None and one.code < 0 and one.rank not in crashed]
    if stopped_by and (killed or not records):
        summary = f"stopped by {stopped_by.name}; the same command goes on from the newest checkpoint"
        return Failure(summary, code=Stopped.exit_code, is_final=True)
    if killed:
        number = -(killed[0].code or 0)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return Failure(f"process {killed[0].rank} was killed by {name}", _tail(killed[0]), is_final=bool(stopped_by))
    return _crash(ended, records, is_final=bool(stopped_by))


def _crash(ended: list[Ended], records: list[Record], is_final: bool) -> Failure:
    if records:
        first = records[0]
        written = next((_tail(one) for one in ended if one.rank == first.rank), "")
        details = "\n".join(part for part in (written, first.message.rstrip()) if part)
        return Failure(f"process {first.rank} failed: {first.summary}", details, is_final=is_final)
    failed = next(one for one in ended if one.code)
    summary = f"process {failed.rank} ended with exit code {failed.code}"
    code = _INTERRUPTED if failed.code == _INTERRUPTED else 1
    return Failure(summary, _tail(failed), code, is_final or code == _INTERRUPTED)


def _tail(process: Ended) -> str:
    """The last lines of what a process wrote; nothing for process 0, which writes to the terminal."""
    if not process.errors.is_file():
        return ""
    text = process.errors.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
