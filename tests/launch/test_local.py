"""The launcher with real processes: exit codes, restarts, signals, and nobody left behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import begin, environment, free_port, launcher, notes, run, write_worker
from support.waiting import TIMEOUT, is_alive, wait_until

from paceline.core.process import STOP_SIGNALS
from paceline.launch.launcher import worker_command
from paceline.launch.machines import Launch
from paceline.launch.network import Endpoint


def test_every_process_has_its_place_and_its_share_of_the_cores(tmp_path: Path) -> None:
    body = """
    def body():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        note(" ".join(os.environ[name] for name in names))
        print(f"from {rank}")
        return 0
    """
    done = run(tmp_path, body, Launch(3))
    share = max(1, len(os.sched_getaffinity(0)) // 3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "from 0\n", "")
    assert [notes(tmp_path, rank) for rank in range(3)] == [
        [f"{rank} 3 {rank} 3 127.0.0.1 {share}"] for rank in range(3)
    ]


def test_threads_that_the_user_has_set_are_kept(tmp_path: Path) -> None:
    done = run(tmp_path, "def body(): return note(os.environ['OMP_NUM_THREADS']) or 0", OMP_NUM_THREADS="7")
    assert done.returncode == 0
    assert notes(tmp_path, 1) == ["7"]


def test_a_program_that_launches_keeps_its_environment(tmp_path: Path) -> None:
    write_worker(tmp_path, "def body(): return 0")
    code = (
        "import os, sys; from paceline.launch.launcher import Launch, launch; import torch.distributed.elastic.agent;"
        "from paceline.core.process import forget_spinning; forget_spinning(); before = dict(os.environ);"
        "code = launch([sys.executable, 'worker.py'], Launch(2));"
        "print(code, sorted(name for name in before.keys() | os.environ if before.get(name) != os.environ.get(name)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert done.stdout == "0 []\n"


def test_words_reach_the_processes_as_they_are(tmp_path: Path) -> None:
    write_worker(tmp_path, "def body(): return note(sys.argv[1:]) or 0")
    words = ["a b", "$HOME", "$$", "${local_rank}", "x=*"]
    command = launcher(Launch(2), [sys.executable, "worker.py", *words])
    subprocess.run(command, cwd=tmp_path, env=environment(), timeout=TIMEOUT, check=True)
    assert notes(tmp_path, 1) == [str(words)]


@pytest.mark.parametrize(
    ("error", "code"),
    [("RecipeError", 2), ("DataError", 3), ("CheckpointError", 4), ("Stopped", 75), ("TrainingError", 1)],
)
def test_an_error_that_all_find_is_reported_once_and_not_tried_again(tmp_path: Path, error: str, code: int) -> None:
    body = f"""
    def body():
        note(start)
        wait_for_all()
        raise {error}("data/cats: no such folder")
    """
    done = run(tmp_path, body, Launch(3))
    assert (done.returncode, done.stderr) == (code, "data/cats: no such folder\n")
    assert [notes(tmp_path, rank) for rank in range(3)] == [["0"]] * 3


def test_a_reader_who_leaves_ends_all_processes_once(tmp_path: Path) -> None:
    """As `paceline eval … | grep -m1` does."""
    body = """
    def body():
        note(start)
        wait_for_all()
        if rank == 0:
            raise BrokenPipeError
        time.sleep(60)
    """
    assert run(tmp_path, body).returncode == 1
    assert [notes(tmp_path, rank) for rank in range(2)] == [["0"]] * 2


def test_what_others_die_of_in_consequence_is_not_printed(tmp_path: Path) -> None:
    body = """
    def body():
        note(start)
        wait_for_all()
        if rank == 1:
            raise DataError("cat.jpg: cannot be read")
        wait_for(lambda: list(Path(os.environ["PACELINE_RECORDS"]).glob("rank-1.json")))
        raise RuntimeError("Connection closed by peer")
    """
    done = run(tmp_path, body)
    assert (done.returncode, done.stderr) == (3, "cat.jpg: cannot be read\n")
    assert notes(tmp_path, 0) == ["0"]


def test_the_command_itself_is_a_worker(tmp_path: Path) -> None:
    """Process 0 answers, the other is silent; a mistake that both find is said once."""
    commands = [worker_command(["schema"]), worker_command(["check", "no-such-recipe"])]
    good, bad = (
        subprocess.run(
            launcher(Launch(2), words),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        for words in commands
    )
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["title"] == "Paceline recipe"
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("no-such-recipe") == 1
    assert "Traceback" not in bad.stderr


@pytest.mark.parametrize("code", [3, 75])
def test_such_a_code_is_final_without_words_too(tmp_path: Path, code: int) -> None:
    body = f"""
    def body():
        note(start)
        if rank == 1:
            print("last words", file=sys.stderr)
            return {code}
        return 0
    """
    done = run(tmp_path, body)
    assert done.returncode == code
    assert done.stderr == f"last words\nprocess 1 ended with exit code {code}\n"
    assert notes(tmp_path, 1) == ["0"]


def test_a_crash_is_tried_again_and_then_printed_with_the_last_lines(tmp_path: Path) -> None:
    body = """
    def body():
        note(start)
        if rank == 1:
            print("a hint", file=sys.stderr)
            raise ValueError("out of luck")
        wait_for(lambda: list(Path(os.environ["PACELINE_RECORDS"]).glob("rank-1.json")))
        raise RuntimeError("Connection closed by peer")
    """
    done = run(tmp_path, body, Launch(2, restarts=1))
    assert done.returncode == 1
    assert notes(tmp_path, 1) == ["0", "1"]
    lines = done.stderr.splitlines()
    assert lines[0] == "process 1 failed: ValueError: out of luck; restarting (1 of 1 restart)"
    assert lines[1:3] == ["a hint", "Traceback (most recent call last):"]
    assert lines[-1] == "process 1 failed: ValueError: out of luck; the one restart is used up"
    assert len([line for line in lines if line.startswith("Traceback")]) == 1


def test_a_killed_process_comes_back_with_all_others(tmp_path: Path) -> None:
    body = """
    def body():
        note(start)
        if start == 0:
            wait_for_all()
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return 0
    """
    done = run(tmp_path, body, Launch(3))
    assert done.returncode == 0
    assert done.stderr == "process 2 was killed by SIGKILL; restarting (1 of 3 restarts)\n"
    assert [notes(tmp_path, rank) for rank in range(3)] == [["0", "1"]] * 3


_PATIENT = """
def body():
    caught = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: caught.append(number))
    note(os.getpid())
    wait_for(lambda: caught)
    time.sleep(0.3 * rank)
    note(f"{len(caught)} {signal.Signals(caught[0]).name}")
    raise Stopped("saved at step 7")
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_request_to_stop_is_passed_on_once_and_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    with begin(tmp_path, _PATIENT) as going:
        wait_until(lambda: all(notes(tmp_path, rank) for rank in (0, 1)), "both are there")
        going.send_signal(number)
        done = going.wait()
    assert (done.returncode, done.stderr) == (75, "saved at step 7\n")
    passed_on = signal.SIGTERM if number in (signal.SIGHUP, signal.SIGINT) else number
    assert [notes(tmp_path, rank)[1:] for rank in (0, 1)] == [[f"1 {passed_on.name}"]] * 2


def test_an_interrupt_of_every_process_counts_once(tmp_path: Path) -> None:
    """As LSF does it: a second SIGINT would end a process without its state."""
    counting = _PATIENT.replace("wait_for(lambda: caught)", "wait_for(lambda: len(caught) > 1)")
    counting = counting.replace('f"{len(caught)} {signal.Signals(caught[0]).name}"', "caught.count(signal.SIGINT)")
    with begin(tmp_path, counting) as going:
        wait_until(lambda: all(notes(tmp_path, rank) for rank in (0, 1)), "both are there")
        for rank in (0, 1):
            os.kill(int(notes(tmp_path, rank)[0]), signal.SIGINT)
        going.send_signal(signal.SIGINT)
        assert going.wait().returncode == 75
    assert [notes(tmp_path, rank)[1:] for rank in (0, 1)] == [["1"]] * 2


_DEAF = """
def body():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: note(signal.Signals(number).name))
    note(os.getpid())
    time.sleep(1000)
"""


def test_who_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    with begin(tmp_path, _DEAF, Launch(2, stop_timeout=0.5)) as going:
        wait_until(lambda: all(notes(tmp_path, rank) for rank in (0, 1)), "both are there")
        going.send_signal(signal.SIGTERM)
        done = going.wait()
    assert done.returncode == 75
    assert done.stderr == "stopped by SIGTERM; the same command resumes from the newest checkpoint\n"
    assert not any(is_alive(int(notes(tmp_path, rank)[0])) for rank in (0, 1))


def test_a_second_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    with begin(tmp_path, _DEAF) as going:
        wait_until(lambda: all(notes(tmp_path, rank) for rank in (0, 1)), "both are there")
        going.send_signal(signal.SIGINT)
        wait_until(lambda: all(notes(tmp_path, rank)[1:] == ["SIGTERM"] for rank in (0, 1)), "both were signaled")
        assert not going.ends_within(0.5)
        going.send_signal(signal.SIGINT)
        done = going.wait()
    assert (done.returncode, done.stderr) == (130, "ended at once\n")
    assert not any(is_alive(int(notes(tmp_path, rank)[0])) for rank in (0, 1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_processes_end_with_their_launcher_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    with begin(tmp_path, _DEAF, Launch(3)) as going:
        wait_until(lambda: all(notes(tmp_path, rank) for rank in range(3)), "all are there")
        going.send_signal(number)
        going.wait()
    processes = [int(notes(tmp_path, rank)[0]) for rank in range(3)]
    wait_until(lambda: not any(map(is_alive, processes)), "all have ended")
    assert len(set(processes)) == 3
    assert [process for process in processes if is_alive(process)] == []


def test_what_a_killed_process_has_started_ends_too(tmp_path: Path) -> None:
    body = """
    import subprocess
    def body():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        note(child.pid)
        wait_for_all()
        raise DataError("no")
    """
    done = run(tmp_path, body)
    children = [int(notes(tmp_path, rank)[0]) for rank in (0, 1)]
    wait_until(lambda: not any(map(is_alive, children)), "what they had started has ended")
    assert (done.returncode, len(set(children))) == (3, 2)


def test_a_process_that_dies_once_its_work_is_done_has_done_it(tmp_path: Path) -> None:
    body = """
    import atexit
    def body():
        note(start)
        print(f"from {rank}")
        if rank == 1:
            atexit.register(os.abort)
        return 0
    """
    done = run(tmp_path, body)
    assert (done.returncode, done.stdout, done.stderr) == (0, "from 0\n", "")
    assert [notes(tmp_path, rank) for rank in (0, 1)] == [["0"], ["0"]]


def test_process_0_sees_the_terminal(tmp_path: Path) -> None:
    write_worker(tmp_path, "def body(): return note(f'{sys.stdout.isatty()} {sys.stderr.isatty()}') or 0")
    ours, theirs = pty.openpty()
    subprocess.run(
        launcher(Launch(2)),
        cwd=tmp_path,
        env=environment(),
        stdout=theirs,
        stderr=theirs,
        timeout=TIMEOUT,
        check=True,
    )
    os.close(theirs)
    os.close(ours)
    assert [notes(tmp_path, rank) for rank in (0, 1)] == [["True True"], ["False False"]]


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    done = run(tmp_path, "def body(): return print('x', file=sys.stderr) or 0", TMPDIR=str(place))
    assert (done.returncode, list(place.iterdir())) == (0, [])


# Processes whose loader workers are in the middle of a sample, in which torch does not look after their parent.
_READING = """
    import numpy as np
    from paceline.data.loader import load_by_processes
    from paceline.data.split_loader import Request
    class Source:
        def fetch(self, epoch, ids):
            if ids[0] < 2:
                return np.arange(3)  # what is sent to the parent goes through sockets that lie in a folder
            note(os.getpid())
            time.sleep(1000)
    def body():
        for _ in load_by_processes(Source(), [Request(0, np.array([number])) for number in range(8)], 2):
            pass
"""


def test_a_killed_launcher_leaves_no_loader_worker_and_its_folder_to_the_next(tmp_path: Path) -> None:
    place = tmp_path / "t"
    place.mkdir()
    with begin(tmp_path, _READING, Launch(1), TMPDIR=str(place)) as going:
        wait_until(lambda: len(notes(tmp_path, 0)) == 2, "both workers read")
        going.send_signal(signal.SIGKILL)
        going.wait()
    workers = [int(each) for each in notes(tmp_path, 0)]
    wait_until(lambda: not any(map(is_alive, workers)), "they have ended")
    assert len(list(place.iterdir())) == 1
    assert run(tmp_path, "def body(): return 0", TMPDIR=str(place)).returncode == 0
    assert list(place.iterdir()) == []


def test_a_rendezvous_that_nobody_serves_is_given_up(tmp_path: Path) -> None:
    # An address kept for documentation: no machine has it.
    plan = Launch(1, 2, 2, Endpoint("192.0.2.1", 29400), rendezvous_timeout=1)
    done = run(tmp_path, "def body(): return note('started') or 0", plan)
    assert done.returncode == 1
    waiting, problem = done.stderr.splitlines()
    assert waiting == "waiting for 2 machines at 192.0.2.1:29400"
    assert problem.startswith("--rendezvous 192.0.2.1:29400: no answer after 1 s;")
    assert notes(tmp_path, 0) == []


def test_machines_that_do_not_come_are_given_up(tmp_path: Path) -> None:
    plan = Launch(1, 2, 2, Endpoint("127.0.0.1", free_port()), rendezvous_timeout=5)
    done = run(tmp_path, "def body(): return note('started') or 0", plan)
    assert done.returncode == 1
    assert "fewer than 2 machines joined within 5 s" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert notes(tmp_path, 0) == []


def run_on_two(folder: Path, body: str, stop: bool = False) -> tuple[list[int], list[list[str]]]:
    """Two launchers that meet on this machine: their exit codes, and what each has printed after the first line."""
    plan = Launch(1, 2, 2, Endpoint("127.0.0.1", free_port()), restarts=0)
    folders = [folder / name for name in ("first", "second")]
    for each in folders:
        each.mkdir()
    with begin(folders[0], body, plan) as first, begin(folders[1], body, plan) as second:
        if stop:
            wait_until(lambda: len([*folder.glob("*/rank-*.notes")]) == 2, "both are there")
            second.send_signal(signal.SIGTERM)
        done = [first.wait(), second.wait()]
    return [each.returncode for each in done], [each.stderr.splitlines()[1:] for each in done]


def test_a_machine_that_gives_up_ends_the_processes_of_the_others(tmp_path: Path) -> None:
    body = """
    def body():
        note(start)
        if rank == 1:
            raise ValueError("out of luck")
        time.sleep(1000)
    """
    codes, (first, second) = run_on_two(tmp_path, body)
    assert codes == [1, 1]
    printed = {*first, *second}
    assert "process 1 failed: ValueError: out of luck" in printed
    assert "a machine has not sent a heartbeat, or its processes have ended" in printed


def test_a_machine_that_has_stopped_leaves_the_others_time_to_save(tmp_path: Path) -> None:
    body = f"""
    def body():
        stop = Path({str(tmp_path)!r}, "stop")
        signal.signal(signal.SIGTERM, lambda number, frame: stop.touch())
        note(start)
        wait_for(stop.exists)
        time.sleep(4.5 if rank == 0 else 0)  # longer than other failures are waited for
        note("saved")
        raise Stopped("saved")
    """
    assert run_on_two(tmp_path, body, stop=True) == ([75, 75], [["saved"], ["saved"]])
    assert [path.read_text() for path in tmp_path.glob("*/rank-*.notes")] == ["0\nsaved\n"] * 2
