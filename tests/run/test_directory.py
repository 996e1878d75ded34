"""One run, one directory: who may write there, and what is left when a process dies."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from support.full_disk import files_limited_to

from paceline.core.errors import PacelineError, UsageError
from paceline.core.file_lock import LOCK
from paceline.run import directory as run_lock_module
from paceline.run.directory import Owner, check_free, hold_lock, refuse_foreign

HOLD = """
import sys, time
from pathlib import Path
from paceline.run.directory import hold_lock
with hold_lock(Path(sys.argv[1])) as lock:
    {then}
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path, then: str = "pass") -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the folder."""
    command = [sys.executable, "-c", HOLD.format(then=then), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def left_behind(folder: Path, **changes: Any) -> dict[str, Any]:
    """A lock file that no process holds, as this process would have written it but for the changes."""
    with hold_lock(folder):
        owner = json.loads((folder / LOCK).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK).write_text(json.dumps({**owner, **changes}))
    return {**owner, **changes}


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_the_second_learns_who_is_first(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    with holder(folder) as first:
        since = json.loads((folder / LOCK).read_text())["since"]
        message = f"{folder} is in use by process {first.pid} on {socket.gethostname()}, since {since}; wait for it"
        with pytest.raises(UsageError) as caught, hold_lock(folder):
            pass
        assert str(caught.value).startswith(message)
        assert caught.value.exit_code == 2
        with pytest.raises(UsageError) as caught:
            check_free(folder)
        assert str(caught.value).startswith(message)
        assert json.loads((folder / LOCK).read_text())["pid"] == first.pid


def test_nothing_is_left_of_a_lock_that_was_released(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    with hold_lock(folder):
        assert [path.name for path in folder.iterdir()] == [LOCK]
    assert not (tmp_path / "runs").exists()
    with hold_lock(folder):
        (folder / "logs").mkdir()
    assert [path.name for path in folder.iterdir()] == ["logs"]
    with pytest.raises(UsageError), hold_lock(folder):
        raise UsageError("something else")
    assert not (folder / LOCK).exists()
    check_free(folder)


def test_a_killed_process_leaves_a_directory_that_can_be_taken_over(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=10)
    assert (tmp_path / LOCK).exists()
    check_free(tmp_path)
    with hold_lock(tmp_path) as lock:
        assert len(lock.notes) == 1
        assert f"process {first.pid} on" in lock.notes[0]
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_children_of_a_killed_process_do_not_keep_the_lock(tmp_path: Path) -> None:
    child = "import os; child = os.fork(); child or time.sleep(5); child or os._exit(0)"
    with holder(tmp_path, then=child) as first:
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=10)
        with hold_lock(tmp_path) as lock:
            assert lock.notes


def _compete(folder: Path, start: Barrier, end: Barrier, won: list[int]) -> None:
    start.wait(20)
    try:
        with hold_lock(folder):
            won.append(os.getpid())
            end.wait(20)
    except UsageError:
        end.wait(20)


def test_many_at_once_have_one_winner(tmp_path: Path) -> None:
    forking, number = multiprocessing.get_context("fork"), 8
    with multiprocessing.Manager() as manager:
        for attempt in range(5):
            folder = tmp_path / str(attempt)
            left_behind(folder, pid=ended_process())
            won: Any = manager.list()
            shared = (folder, forking.Barrier(number), forking.Barrier(number), won)
            processes = [forking.Process(target=_compete, args=shared) for _ in range(number)]
            for process in processes:
                process.start()
            for process in processes:
                process.join(30)
            assert [process.exitcode for process in processes] == [0] * number
            assert len(won) == 1


def test_a_lock_that_is_free_is_free_whatever_it_says(tmp_path: Path) -> None:
    """Of this process, of a container that had another name, and of a machine that had this disk before."""
    before: list[dict[str, Any]] = [{}, {"host": "another-pod"}, {"host": "elsewhere", "pid": 7}]
    for number, changes in enumerate(before):
        left_behind(tmp_path / str(number), **changes)
        check_free(tmp_path / str(number))
        with hold_lock(tmp_path / str(number)) as lock:
            assert "took over" in lock.notes[0]


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("without_locks")
def test_without_locks_what_they_say_is_believed(tmp_path: Path) -> None:
    left_behind(tmp_path / "alive")
    with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"):
        check_free(tmp_path / "alive")
    stale = [{"pid": ended_process()}, {"pid": 2**40}]
    for number, changes in enumerate(stale):
        left_behind(tmp_path / str(number), **changes)
        check_free(tmp_path / str(number))
    with hold_lock(tmp_path / "0") as lock:
        assert "took over" in lock.notes[0]


def test_a_process_of_another_user_is_alive(tmp_path: Path) -> None:
    mine = left_behind(tmp_path)
    if os.geteuid() != 0:
        assert Owner(**{**mine, "pid": 1}).is_running()
        return
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(0 if Owner(**mine).is_running() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("has_locks", [True, False])
def test_another_machine_whose_locks_are_not_seen_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, has_locks: bool
) -> None:
    if has_locks:
        monkeypatch.setattr(run_lock_module, "is_seen_everywhere", lambda _: False)
    else:
        request.getfixturevalue("without_locks")
    left_behind(tmp_path / "run", host="elsewhere", pid=7)
    with pytest.raises(UsageError, match=rf"process 7 on elsewhere, since .*remove .*/run/\{LOCK}"):
        check_free(tmp_path / "run")
    # The processes of a run that was started again, here or on another machine, follow those that are gone.
    monkeypatch.setenv("PACELINE_RESTARTS", "1")
    with hold_lock(tmp_path / "run") as lock:
        assert lock.notes


def test_on_a_full_disk_there_is_one_line_and_no_empty_lock(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    with files_limited_to(0), pytest.raises(PacelineError, match=r"x/\.lock: .*too large") as caught, hold_lock(folder):
        pass
    assert (caught.value.exit_code, folder.exists()) == (1, False)
    (folder / "logs").mkdir(parents=True)
    (folder / LOCK).touch()
    refuse_foreign(folder)
    check_free(folder)
    with hold_lock(folder) as lock:
        assert lock.notes == []


def test_starting_over_keeps_the_earlier_run_and_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    with hold_lock(folder) as lock:
        assert lock.start_over() is None
        (folder / "status.json").write_text("{}")
        assert lock.start_over() == tmp_path / "x~1"
        assert [path.name for path in (tmp_path / "x~1").iterdir()] == ["status.json"]
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
        script = "from pathlib import Path; from paceline.run.directory import *; check_free(Path('x'))"
        command = [sys.executable, "-c", script]
        other = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path)
        assert f"in use by process {os.getpid()}" in other.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x~1"]


def test_starting_over_keeps_a_link_and_moves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "disk" / "run~1").symlink_to("nowhere")
    (tmp_path / "x").symlink_to("disk/run")
    with hold_lock(tmp_path / "x") as lock:
        (tmp_path / "x" / "status.json").write_text("{}")
        assert lock.start_over() == tmp_path / "disk" / "run~2"
        assert (tmp_path / "x").readlink() == Path("disk/run")
        assert [path.name for path in (tmp_path / "disk" / "run").iterdir()] == [LOCK]
        (tmp_path / "x" / "status.json").write_text("{}")
        assert lock.start_over() == tmp_path / "disk" / "run~3"
    assert [path.name for path in (tmp_path / "disk" / "run~3").iterdir()] == ["status.json"]
    (tmp_path / "y").symlink_to("disk/new")
    with hold_lock(tmp_path / "y"):
        (tmp_path / "disk" / "new" / "logs").mkdir()
    assert (tmp_path / "y").readlink() == Path("disk/new")


def test_what_lies_in_the_way_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LOCK).symlink_to(tmp_path / "target")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / LOCK)
    (tmp_path / "folder" / LOCK).mkdir(parents=True)
    for name in ("link", "pipe", "folder"):
        with pytest.raises(UsageError, match=r"\.lock: "), hold_lock(tmp_path / name):
            pass
    assert (tmp_path / "target").read_text() == "kept"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / LOCK).write_text("not of ours")
    with hold_lock(tmp_path / "text"):
        pass


def test_foreign_directories_are_refused(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    refuse_foreign(project)
    refuse_foreign(tmp_path / "absent")
    (project / "recipe.yaml").write_text("name: mine")
    with pytest.raises(
        UsageError, match=r"project is not a run directory and not empty: it holds recipe\.yaml; choose"
    ):
        refuse_foreign(project)
    for number in range(6):
        (project / f"photo-{number}.jpg").touch()
    with pytest.raises(UsageError, match=r"photo-0.jpg, .*, photo-4.jpg and 2 more"):
        refuse_foreign(project)
    (project / "status.json").write_text("[1, 2]")
    with pytest.raises(UsageError):
        refuse_foreign(project)
    (project / "status.json").write_text('{"state": "failed", "step": 3}')
    refuse_foreign(project)


def test_a_start_that_was_cut_short_is_no_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "recipe.yaml").touch()
    refuse_foreign(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError):
        refuse_foreign(tmp_path)
    with hold_lock(tmp_path):
        refuse_foreign(tmp_path)
