"""Runs the processes of one machine: starts them, restarts them, and stops them together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from types import FrameType

from paceline.core.errors import Stopped
from paceline.core.place import Place
from paceline.core.process import handle_stop_signals
from paceline.core.text import pluralize
from paceline.launch.environment import LAUNCHER, RECORDS, RESTARTS
from paceline.launch.failure import ExitedProcess, Failure, find_failure, is_done, read_records
from paceline.launch.machines import Change, Launch, Machines, Start

# How long other processes may take to notice a failed one and to report why; then they are killed.
_GRACE_SECONDS = 3.0
_LAST_SECONDS = 5.0  # for other machines to learn why a run has ended
_POLL_SECONDS = 0.05


class Interrupted(BaseException):
    """A request to stop came while no process was there to save anything, or had to be obeyed at once.

    No Exception: libraries catch those, in the middle of their imports too.
    """


class StopSignals:
    """The first signal that asked this launcher to stop; `at_once` after a second SIGINT."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.at_once = False
        self.is_waiting = True  # nothing is lost if the launcher is interrupted where it stands
        self._interrupts = 0

    @property
    def to_forward(self) -> signal.Signals:
        """What to send to the processes: they know nothing of a terminal.

        Some schedulers send SIGINT to every process of a job. One more from us would be the second, which ends at once.
        """
        return signal.SIGTERM if self.received in (None, signal.SIGHUP, signal.SIGINT) else self.received

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the stop signals as requests; the launcher's process ends behind it, so no request comes too late."""
        with handle_stop_signals(self._note, until_exit=True):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Be interrupted by the first request, here or before."""
        self.is_waiting = True  # first: a request between these two lines would be seen by neither
        if self.received:
            raise Interrupted
        yield
        self.is_waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        self.received = self.received or signal.Signals(number)
        self._interrupts += number == signal.SIGINT
        self.at_once = self._interrupts > 1
        if (is_first and self.is_waiting) or (number == signal.SIGINT and self._interrupts == 2):
            raise Interrupted


class Supervisor:
    """Runs a command in the processes of this machine, restarted as often as the plan allows."""

    def __init__(
        self,
        command: Sequence[str],
        plan: Launch,
        machines: Machines,
        stop: StopSignals,
        folder: Path,
        print_line: Callable[[str], None],
    ) -> None:
        self._command, self._plan, self._machines, self._stop = command, plan, machines, stop
        self._root = self._folder = folder
        self._print_line = print_line
        self._processes: dict[int, Popen[bytes]] = {}
        self._stop_deadline: float | None = None

    def run(self) -> Failure | None:
        """Run the processes to the end; why they failed, None if they did not."""
        num_restarts, is_counted = 0, False
        num_machines: int | None = None
        while True:
            with self._stop.waiting():
                start = self._machines.begin()
            if num_machines not in (None, start.num_machines):
                self._print_line(
                    f"continuing with {pluralize(start.num_machines, 'machine')} instead of {num_machines}"
                )
                num_restarts -= is_counted  # a restart because a machine was lost is not counted
            num_machines = start.num_machines
            try:
                self._start(start)
                failure = self._watch()
            except BaseException:
                self.kill()
                raise
            if failure is None:
                with suppress(Interrupted), self._stop.waiting():
                    self._machines.finish(self._plan.stop_timeout)
                return None
            is_counted = not self._is_regrouping(failure)
            if is_counted and (failure.is_final or num_restarts == self._plan.restarts):
                self._machines.finish(_LAST_SECONDS, is_done=failure.code == Stopped.exit_code)
                return failure
            if is_counted:
                num_restarts += 1
                number = f"{num_restarts} of {pluralize(self._plan.restarts, 'restart')}"
                self._print_line(f"{failure.summary}; restarting ({number})")

    def kill(self) -> None:
        """Kill the processes and their children."""
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def _start(self, start: Start) -> None:
        """Rank 0 writes to the terminal, each other rank to its own files in a folder of this start."""
        self._folder = self._root / f"start-{start.number}"
        self._folder.mkdir()
        self._processes, self._stop_deadline = {}, None
        ours = {LAUNCHER: str(os.getpid()), RECORDS: str(self._folder), RESTARTS: str(start.number - 1)}
        for local_rank in range(self._plan.processes):
            rank = start.first_rank + local_rank
            place = Place(rank, start.world, local_rank, self._plan.processes, start.address, start.port)
            with ExitStack() as files:
                paths = (self._folder / f"rank-{rank}.{extension}" for extension in ("out", "err"))
                outputs = [files.enter_context(path.open("wb")) if rank else None for path in paths]
                self._processes[rank] = Popen(
                    self._command,
                    env=os.environ | place.variables() | ours,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    start_new_session=True,  # it gets its signals from us, and is killed with all that it has started
                )

    def _watch(self) -> Failure | None:
        """Wait until all processes are done, or one has failed and the others have ended."""
        lost_since: float | None = None
        while True:
            self._forward_stop()
            codes = [process.code for process in self._poll()]
            if any(codes):
                ended = self._wait_for_exit()
                self._share_failure()
                return find_failure(ended, read_records(self._folder), self._stop.received, self._machines.peer_failure)
            if None not in codes:
                return None
            change = self._machines.change()
            if change is Change.JOINING and self._stop_deadline is None:
                self._print_line("the machines of this run have changed: restarting")
                self._ask_to_stop(signal.SIGTERM)
            if change is Change.LOST:
                # A power cut closes no connection, so our processes may not notice by themselves.
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > _GRACE_SECONDS:
                    return self._lost_machine()
            time.sleep(_POLL_SECONDS)

    def _lost_machine(self) -> Failure:
        self.kill()
        if record := self._machines.peer_failure():
            return Failure(record.message, code=record.code, is_final=True)
        return Failure("a machine has not sent a heartbeat, or its processes have ended")

    def _is_regrouping(self, failure: Failure) -> bool:
        """Whether the processes ended because a machine joins."""
        was_asked = failure.code == Stopped.exit_code or not failure.is_final
        return was_asked and not self._stop.received and self._machines.change() is Change.JOINING

    def _forward_stop(self) -> None:
        """Forward a stop request once; kill processes that have not exited after the timeout."""
        if self._stop.received and self._stop_deadline is None:
            self._ask_to_stop(self._stop.to_forward)
        is_late = self._stop_deadline is not None and time.monotonic() > self._stop_deadline
        if self._stop.at_once or is_late:
            self.kill()

    def _ask_to_stop(self, number: signal.Signals) -> None:
        self._stop_deadline = time.monotonic() + self._plan.stop_timeout
        for process in self._processes.values():
            process.send_signal(number)

    def _wait_for_exit(self) -> list[ExitedProcess]:
        """Wait for the other processes to exit, then kill those that have not; returns how each ended."""
        processes, began = list(self._processes.values()), time.monotonic()
        while any(process.poll() is None for process in processes):
            self._forward_stop()
            self._share_failure()
            # After a stop request one process may be done while another still writes.
            is_stopping = all(process.returncode in (None, 0, Stopped.exit_code) for process in processes)
            if time.monotonic() - began > (self._plan.stop_timeout if is_stopping else _GRACE_SECONDS):
                break
            time.sleep(_POLL_SECONDS)
        ended = self._poll()
        self.kill()
        return ended

    def _poll(self) -> list[ExitedProcess]:
        """The exit codes: None while running, and 0 once the work was done, whatever ended the process then."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return [
            ExitedProcess(rank, 0 if code and is_done(self._folder, rank) else code, self._folder / f"rank-{rank}.err")
            for rank, code in codes.items()
        ]

    def _share_failure(self) -> None:
        """Share an error with the other machines. On stop requests the processes agree by themselves."""
        for record in read_records(self._folder):
            if record.explained and record.code != Stopped.exit_code:
                self._machines.share_failure(record)
                break
