"""torch's elastic agent with our rules for failures, restarts and stops."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from paceline.core.errors import Stopped
from paceline.core.text import pluralize
from paceline.launch.environment import RECORDS, RESTARTS
from paceline.launch.failure import ExitedProcess, Failure, find_failure, is_done, read_records
from paceline.launch.machines import Machines
from paceline.launch.signals import Interrupted, StopSignals
from paceline.launch.variables import set_variables

# How long other processes may take to notice a failed one and to report why; then they are killed.
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05

# Its messages are for developers of torch; we print what users need.
logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
logging.getLogger("torch.distributed.elastic").propagate = False


class Outputs(LogsSpecs):
    """Rank 0 writes to the terminal; each other rank to its own files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def start(self, number: int) -> None:
        """Use a new folder for a new start."""
        self.folder = Path(self.root_log_dir) / f"start-{number}"
        self.folder.mkdir()

    @property
    def root_log_dir(self) -> str:
        """The folder of all starts."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files for stdout and stderr of each local rank; an empty name is the terminal."""
        ranks = {local_rank: int(variables["RANK"]) for local_rank, variables in envs.items()}
        files = {local: str(self.folder / f"rank-{rank}") if rank else "" for local, rank in ranks.items()}
        return LogsDest(
            stdouts={local: name and f"{name}.out" for local, name in files.items()},
            stderrs={local: name and f"{name}.err" for local, name in files.items()},
            error_files=dict.fromkeys(envs, os.devnull),
        )


class Agent(LocalElasticAgent):
    """Starts and restarts the processes of this machine; `failure` is why it gave up."""

    def __init__(
        self,
        spec: WorkerSpec,
        outputs: Outputs,
        machines: Machines,
        stop: StopSignals,
        stop_timeout: float,
        print_line: Callable[[str], None],
    ) -> None:
        super().__init__(spec, outputs, exit_barrier_timeout=stop_timeout, shutdown_timeout=round(_GRACE_SECONDS))
        self.failure: Failure | None = None
        self._outputs, self._machines, self._stop, self._print_line = outputs, machines, stop, print_line
        self._stop_timeout = stop_timeout
        self._stop_deadline: float | None = None
        self._lost_since: float | None = None
        self._start = 0

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the other machines. A restart because one was lost is not counted."""
        group: Any = worker_group
        before = group.group_world_size
        with self._stop.waiting():
            super()._rendezvous(worker_group)
            now = group.group_world_size
            self._start = self._machines.begin(group.store, group.group_rank, now)
        if before is not None and now != before:
            self._print_line(f"continuing with {now} {'machine' if now == 1 else 'machines'} instead of {before}")
            if self.failure:
                self._remaining_restarts = min(worker_group.spec.max_restarts, self._remaining_restarts + 1)
        self.failure, self._lost_since = None, None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._outputs.start(self._start)
        set_variables({RECORDS: str(self._outputs.folder), RESTARTS: str(self._start - 1)})
        identifiers: dict[int, Any] = super()._start_workers(worker_group)
        return identifiers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Poll the processes; once one has failed, end the others and decide whether to restart."""
        self._forward_stop()
        codes = [ended.code for ended in self._poll(worker_group)]
        if any(codes):
            ended = self._wait_for_exit(worker_group)
            self.failure = find_failure(
                ended, read_records(self._outputs.folder), self._stop.received, self._machines.peer_failure
            )
            self._share_failure()
        elif None not in codes:
            return RunResult(state=WorkerState.SUCCEEDED)
        elif self._has_lost_machine():
            self.kill()
            self.failure = Failure("a machine has not sent a heartbeat")
        else:
            return RunResult(state=WorkerState.HEALTHY)
        self._decide(worker_group, self.failure)
        return RunResult(state=WorkerState.FAILED)

    def _decide(self, worker_group: WorkerGroup, failure: Failure) -> None:
        """Set how many restarts remain: the agent restarts the processes while there are any."""
        limit = worker_group.spec.max_restarts
        if failure.code == Stopped.exit_code and not self._stop.received and self._machines.are_regrouping():
            self._remaining_restarts += 1  # another machine requested this restart, which is not counted
        elif failure.is_final:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            number = limit - self._remaining_restarts + 1
            self._print_line(f"{failure.summary}; restarting ({number} of {pluralize(limit, 'restart')})")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before a restart, ask running processes to save, which they can if all machines are there."""
        if worker_group.state == WorkerState.HEALTHY:
            self._print_line("the machines of this run have changed: restarting")
            self._machines.regroup()
        self._shutdown(timeout=round(_GRACE_SECONDS if self._machines.num_lost() else self._stop_timeout))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._stop.at_once:
            self.kill()
        super()._shutdown(death_sig, timeout)

    def _record_worker_events(self, result: RunResult) -> None:
        """Do nothing."""

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        """An empty event: the agent's would ask the name server each time, which may take seconds."""
        return Event(state, source)

    def _processes(self) -> list[Popen[bytes]]:
        """The processes of the current start, by local rank."""
        if not isinstance(self._pcontext, SubprocessContext):
            return []
        return [handler.proc for _, handler in sorted(self._pcontext.subprocess_handlers.items())]

    def _forward_stop(self) -> None:
        """Forward a stop request once; kill processes that have not exited after the timeout."""
        if self._stop.received is None:
            return
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + self._stop_timeout
            for process in self._processes():
                process.send_signal(self._stop.to_forward)
        if self._stop.at_once or time.monotonic() > self._stop_deadline:
            self.kill()

    def _wait_for_exit(self, worker_group: WorkerGroup) -> list[ExitedProcess]:
        """Wait for the other processes to exit, then kill those that have not; returns how each ended."""
        processes, began = self._processes(), time.monotonic()
        while any(process.poll() is None for process in processes):
            self._forward_stop()
            self._share_failure()
            # After a stop request one process may be done while another still writes.
            is_stopping = all(process.returncode in (None, 0, Stopped.exit_code) for process in processes)
            if time.monotonic() - began > (self._stop_timeout if is_stopping else _GRACE_SECONDS):
                break
            time.sleep(_POLL_SECONDS)
        ended = self._poll(worker_group)
        self.kill()
        return ended

    def _poll(self, worker_group: WorkerGroup) -> list[ExitedProcess]:
        """The exit codes: None while running, and 0 once the work was done, whatever ended the process then."""
        ranks = [worker.global_rank for worker in worker_group.workers]
        codes = [process.poll() for process in self._processes()]
        folder = self._outputs.folder
        return [
            ExitedProcess(rank, 0 if code and is_done(folder, rank) else code, folder / f"rank-{rank}.err")
            for rank, code in zip(ranks, codes, strict=True)
        ]

    def kill(self) -> None:
        """Kill the processes and their children."""
        for process in self._processes():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes():
            process.wait()

    def _has_lost_machine(self) -> bool:
        """Whether a machine is lost and our processes do not notice; a power cut closes no connection."""
        if not self._machines.num_lost():
            self._lost_since = None
            return False
        self._lost_since = self._lost_since or time.monotonic()
        return time.monotonic() - self._lost_since > _GRACE_SECONDS

    def _exit_barrier(self) -> None:
        with suppress(Interrupted), self._stop.waiting():
            self._machines.finish(self._exit_barrier_timeout)

    def _share_failure(self) -> None:
        """Share an error with the other machines. On stop requests the processes agree by themselves."""
        for record in read_records(self._outputs.folder):
            if record.explained and record.code != Stopped.exit_code:
                self._machines.share_failure(record)
                break
