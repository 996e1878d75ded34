"""Heartbeats of all ranks, and what happens when they stop."""

from __future__ import annotations

import faulthandler
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from paceline.core.atomic_write import replace_file
from paceline.core.world import World

_FORM = struct.Struct("<dq48s")
_PULSE = struct.Struct("<dq")
_SIZE = _FORM.size + _PULSE.size
EVALUATING = "evaluating"
_LOOKS = 5  # looks within the limit; as many without a beat are a hang


class Beat(NamedTuple):
    """What a rank did last: when, in which step, and in words.

    And when its watch was last awake, and how many exchanges among processes it had begun by then.
    """

    time: float
    step: int
    phase: str
    pulse: float
    collectives: int = 0

    def describe(self, rank: int, now: float) -> str:
        exchanges = f", last known collective: number {self.collectives}" if self.collectives else ""
        return f"rank {rank}: {self.phase} in step {self.step + 1}, {now - self.time:.0f} s ago{exchanges}"


class NoHeartbeat:
    """No heartbeat."""

    def beat(self, step: int, phase: str) -> None:
        """Do nothing."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        yield


class Heartbeat:
    """The beat of one process, in a small file that all processes can read.

    If this process does not beat for `limit` seconds, a thread of it finds out who is behind, writes down what all of
    its own threads are doing, and hands the finding to `give_up`, which ends the process: a blocked exchange among
    processes cannot be called off.
    """

    def __init__(self, folder: Path, world: World, limit: float, give_up: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._world = folder, world
        self._limit, self._give_up = limit, give_up
        path = beat_file(folder, world.rank)
        replace_file(path, bytes(_SIZE), is_durable=False)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._last = (time.time(), 0)
        self._over = threading.Event()

    def beat(self, step: int, phase: str) -> None:
        """Record what this rank is doing; takes a microsecond and no system call."""
        now = time.time()
        self._last = (now, step)
        _FORM.pack_into(self._memory, 0, now, step, phase.encode()[:48])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the heartbeat inside."""
        self._pulse()
        self.beat(self._last[1], "starting")
        watcher = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()

    def _watch(self) -> None:
        """Count looks and not seconds: a machine that slept, or whose clock was set, has not hung."""
        seen, quiet = self._last, 0
        while not self._over.wait(self._limit / _LOOKS):
            self._pulse()
            seen, quiet = self._last, quiet + 1 if self._last == seen else 0
            if quiet == _LOOKS:
                self._give_up(self._finding())
                return

    def _pulse(self) -> None:
        _PULSE.pack_into(self._memory, _FORM.size, time.time(), self._world.num_collectives())

    def _finding(self) -> str:
        """Who is missing, and where: one that is not even awake, or else one that began the fewest exchanges.

        Of several such, it is the one that has been quiet the longest.
        """
        now = time.time()
        beats = {rank: beat for rank in range(self._world.size) if (beat := read_beat(self._folder, rank))}
        asleep = [rank for rank, beat in beats.items() if now - beat.pulse > self._limit / 2]
        behind = min(asleep or beats, key=lambda rank: (beats[rank].collectives, beats[rank].step, beats[rank].time))
        stacks = self._folder / f"stacks-rank-{self._world.rank}.txt"
        with stacks.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        lines = [beat.describe(rank, now) for rank, beat in sorted(beats.items())]
        last = beats[behind]
        summary = (
            f"no progress for {self._limit:g} s: rank {behind} is missing, last seen {last.phase}"
            f" (last known collective: number {last.collectives}); stacks are in {stacks}"
        )
        return "\n".join([*(f"  {line}" for line in lines), stacks.read_text().rstrip(), summary])


def beat_file(folder: Path, rank: int) -> Path:
    """The file of a rank's heartbeat."""
    return folder / f"rank-{rank}"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """What a rank did last, if it did anything."""
    try:
        content = beat_file(folder, rank).read_bytes()
        moment, step, phase = _FORM.unpack_from(content)
        pulse, collectives = _PULSE.unpack_from(content, _FORM.size)
    except (OSError, struct.error):
        return None
    return Beat(moment, step, phase.rstrip(b"\0").decode(errors="replace"), pulse, collectives) if moment else None
