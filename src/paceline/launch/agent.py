"""Torch's elastic agent, with our rules for what a failure means."""

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
from paceline.launch.exit_record import is_done, read_records
from paceline.launch.failure import Ended, Failure, judge
from paceline.launch.machines import Machines
from paceline.launch.signals import Interrupted, StopSignals

# What the others of a failed process may take to find that out and to say why; then they are killed.
_SETTLE_SECONDS = 3.0
_LOOK_SECONDS = 0.05

# Its own words are for developers of torch; what a user must know we say ourselves.
logging.getLogger("torch.distributed.elastic").addHandler(logging.NullHandler())
logging.getLogger("torch.distributed.elastic").propagate = False


class Outputs(LogsSpecs):
    """Process 0 writes to the terminal as if it were alone; each other one to files of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def start(self, number: int) -> None:
        """Use a new folder for the files of a new start."""
        self.folder = Path(self.root_log_dir) / f"start-{number}"
        self.folder.mkdir()

    @property
    def root_log_dir(self) -> str:
        """Where the folders of all starts are."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """For each local rank, a file for standard output and one for errors; an empty name is the terminal."""
        ranks = {local_rank: int(variables["RANK"]) for local_rank, variables in envs.items()}
        files = {local: str(self.folder / f"rank-{rank}") if rank else "" for local, rank in ranks.items()}
        return LogsDest(
            stdouts={local: name and f"{name}.out" for local, name in files.items()},
            stderrs={local: name and f"{name}.err" for local, name in files.items()},
            error_files=dict.fromkeys(envs, os.devnull),
        )


class Agent(LocalElasticAgent):
    """Keeps the processes of this machine alive; `failure` says why they could not be."""

    def __init__(
        self,
        spec: WorkerSpec,
        outputs: Outputs,
        machines: Machines,
        stop: StopSignals,
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(spec, outputs, exit_barrier_timeout=patience, shutdown_timeout=round(_SETTLE_SECONDS))
        self.failure: Failure | None = None
        self._outputs, self._machines, self._stop, self._say = outputs, machines, stop, say
        self._patience = patience
        self._stop_deadline: float | None = None
        self._lost_since: float | None = None
        self._start = 0

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other machines. A restart that came of losing one is not counted."""
        group: Any = worker_group
        before = group.group_world_size
        with self._stop.waiting():
            super()._rendezvous(worker_group)
            now = group.group_world_size
            self._start = self._machines.begin(group.store, group.group_rank, now)
        if before is not None and now != before:
            self._say(f"going on with {now} {'machine' if now == 1 else 'machines'} instead of {before}")
            if self.failure:
                self._remaining_restarts = min(worker_group.spec.max_restarts, self._remaining_restarts + 1)
        self.failure, self._lost_since = None, None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._outputs.start(self._start)
        os.environ[RECORDS] = str(self._outputs.folder)
        os.environ[RESTARTS] = str(self._start - 1)
        identifiers: dict[int, Any] = super()._start_workers(worker_group)
        return identifiers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the processes; once one has failed, end the others and decide whether to begin again."""
        self._obey_stop()
        codes = [ended.code for ended in self._look(worker_group)]
        if any(codes):
            ended = self._settle(worker_group)
            self.failure = judge(ended, read_records(self._outputs.folder), self._stop.received, self._machines.verdict)
            self._publish()
        elif None not in codes:
            return RunResult(state=WorkerState.SUCCEEDED)
        elif self._is_cut_off():
            self.kill()
            self.failure = Failure("a machine is not heard of any more")
        else:
            return RunResult(state=WorkerState.HEALTHY)
        self._decide(worker_group, self.failure)
        return RunResult(state=WorkerState.FAILED)

    def _decide(self, worker_group: WorkerGroup, failure: Failure) -> None:
        """Whether the agent shall start the processes again: it does while restarts remain."""
        limit = worker_group.spec.max_restarts
        if failure.code == Stopped.exit_code and not self._stop.received and self._machines.are_regrouping():
            self._remaining_restarts += 1  # another machine has asked for this restart, which is not counted
        elif failure.is_final:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            number = limit - self._remaining_restarts + 1
            self._say(f"{failure.summary}; starting again ({number} of {pluralize(limit, 'restart')})")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Before a new start: processes that still run are asked to save their state, as they can if all are there."""
        if worker_group.state == WorkerState.HEALTHY:
            self._say("the machines of this run have changed: starting again")
            self._machines.regroup()
        self._shutdown(timeout=round(_SETTLE_SECONDS if self._machines.num_lost() else self._patience))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._stop.at_once:
            self.kill()
        super()._shutdown(death_sig, timeout)

    def _record_worker_events(self, result: RunResult) -> None:
        """Nobody listens to the agent's events."""

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        """An empty one: what the agent would write in asks the name server each time, which may take seconds."""
        return Event(state, source)

    def _processes(self) -> list[Popen[bytes]]:
        """Those of the present start, by local rank."""
        if not isinstance(self._pcontext, SubprocessContext):
            return []
        return [handler.proc for _, handler in sorted(self._pcontext.subprocess_handlers.items())]

    def _obey_stop(self) -> None:
        """Pass a request to stop on, once; whoever has not ended when patience does is killed."""
        if self._stop.received is None:
            return
        if self._stop_deadline is None:
            self._stop_deadline = time.monotonic() + self._patience
            for process in self._processes():
                process.send_signal(self._stop.to_forward)
        if self._stop.at_once or time.monotonic() > self._stop_deadline:
            self.kill()

    def _settle(self, worker_group: WorkerGroup) -> list[Ended]:
        """Wait for the others to end on their own, then kill those that have not; how each of them ended."""
        processes, began = self._processes(), time.monotonic()
        while any(process.poll() is None for process in processes):
            self._obey_stop()
            self._publish()
            # When one has been asked to stop and has saved its state, another may still be writing.
            is_stopping = all(process.returncode in (None, 0, Stopped.exit_code) for process in processes)
            if time.monotonic() - began > (self._patience if is_stopping else _SETTLE_SECONDS):
                break
            time.sleep(_LOOK_SECONDS)
        ended = self._look(worker_group)
        self.kill()
        return ended

    def _look(self, worker_group: WorkerGroup) -> list[Ended]:
        """How each process stands: no code while it runs, and 0 once its work was done, whatever it died of then."""
        ranks = [worker.global_rank for worker in worker_group.workers]
        codes = [process.poll() for process in self._processes()]
        folder = self._outputs.folder
        return [
            Ended(rank, 0 if code and is_done(folder, rank) else code, folder / f"rank-{rank}.err")
            for rank, code in zip(ranks, codes, strict=True)
        ]

    def kill(self) -> None:
        """End the processes, and what they have started, at once."""
        for process in self._processes():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes():
            process.wait()

    def _is_cut_off(self) -> bool:
        """Whether a machine is lost and our processes do not notice: after a power cut no connection is closed."""
        if not self._machines.num_lost():
            self._lost_since = None
            return False
        self._lost_since = self._lost_since or time.monotonic()
        return time.monotonic() - self._lost_since > _SETTLE_SECONDS

    def _exit_barrier(self) -> None:
        with suppress(Interrupted), self._stop.waiting():
            self._machines.finish(self._exit_barrier_timeout)

    def _publish(self) -> None:
        """Tell the other machines of an error. A request to stop their processes agree on themselves."""
        for record in read_records(self._outputs.folder):
            if record.explained and record.code != Stopped.exit_code:
                self._machines.publish(record)
                break
