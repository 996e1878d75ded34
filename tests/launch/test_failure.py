"""Who is to blame, and whether to begin again."""

from __future__ import annotations

import signal
from pathlib import Path

from paceline.launch.failure import ExitedProcess, ExitRecord, Failure, find_failure, read_records


def blame(
    codes: list[int | None],
    *records: ExitRecord,
    stopped_by: signal.Signals | None = None,
    peer: ExitRecord | None = None,
) -> Failure:
    ended = [ExitedProcess(rank, code, Path(f"no/rank-{rank}.err")) for rank, code in enumerate(codes)]
    return find_failure(ended, list(records), stopped_by, lambda: peer)


def crash(rank: int) -> ExitRecord:
    return ExitRecord(rank, 1, "Traceback (most recent call last):\n  here\nRuntimeError: closed by peer\n", False, 2.0)


def explained(rank: int, code: int) -> ExitRecord:
    return ExitRecord(rank, code, "because", True, 3.0)


def test_an_explained_error_counts_before_all_else() -> None:
    assert blame([1, 3], crash(0), explained(1, 3)) == Failure("because", code=3, is_final=True)
    assert blame([1, -9], explained(0, 1)) == Failure("because", code=1, is_final=True)
    assert blame([1], crash(0), peer=explained(5, 4)) == Failure("because", code=4, is_final=True)


def test_a_killed_process_counts_before_crashes_that_came_of_it() -> None:
    assert blame([1, -9], crash(0)).summary == "process 1 was killed by SIGKILL"
    assert not blame([1, -9], crash(0)).is_final
    assert blame([-6, -9], crash(0)).summary == "process 1 was killed by SIGKILL"
    assert blame([-63]).summary == "process 0 was killed by signal 63"


def test_a_crash_is_named_by_its_last_line() -> None:
    failure = blame([1, 1], crash(0))
    assert failure.summary == "process 0 failed: RuntimeError: closed by peer"
    assert failure.details == crash(0).message.rstrip()
    assert (failure.code, failure.is_final) == (1, False)
    assert blame([0, 7]).summary == "process 1 ended with exit code 7"


def test_after_a_request_to_stop_nothing_is_tried_again() -> None:
    killed = blame([-15, 1], crash(1), stopped_by=signal.SIGTERM)
    assert (killed.code, killed.is_final) == (75, True)
    assert blame([130, 130], stopped_by=signal.SIGINT).code == 75
    assert blame([None, None], stopped_by=signal.SIGUSR1).code == 75
    broken = blame([1, 1], crash(0), stopped_by=signal.SIGTERM)
    assert (broken.code, broken.is_final) == (1, True)
    assert blame([4, 75], explained(0, 4), stopped_by=signal.SIGTERM).code == 4


def test_an_interrupt_of_a_single_process_is_not_tried_again() -> None:
    assert (blame([130, None]).code, blame([130, None]).is_final) == (130, True)


def test_records_come_back_in_the_order_of_time(tmp_path: Path) -> None:
    for record in (explained(0, 3), crash(1)):
        (tmp_path / f"rank-{record.rank}.json").write_text(record.as_text())
    assert read_records(tmp_path) == [crash(1), explained(0, 3)]


def test_a_tail_is_short(tmp_path: Path) -> None:
    errors = tmp_path / "rank-1.err"
    errors.write_bytes(b"\xff\n" + b"\n".join(b"line %d" % number for number in range(100)))
    failure = find_failure([ExitedProcess(1, 9, errors)], [], None, lambda: None)
    assert failure.details.splitlines() == [f"line {number}" for number in range(80, 100)]
