"""This process: the signals that ask it to stop, the parent it ends with, its standard streams and its memory."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.core.errors import Stopped

# All that schedulers send before they end a job.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def handle_stop_signals(handler: Handler, until_exit: bool = False) -> Iterator[None]:
    """Have `handler` answer the stop signals inside; one that is ignored, as SIGHUP under nohup, stays ignored.

    With `until_exit` all but SIGINT are ignored afterwards: the process is about to end, and a repeated request must
    not change its exit code.
    """
    wanted = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, signal.SIG_IGN if until_exit and number != signal.SIGINT else before)


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Hold the stop signals back inside; threads and processes that are started inside never receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """Whether this process was asked to stop. A second SIGINT ends it at once."""

    def __init__(self, is_starting: bool = False) -> None:
        self.requested = False
        self.reason = ""
        self.is_starting = is_starting
        """Whether there is nothing to save yet, so that a request ends the process where it stands."""
        self._is_held = False

    def __str__(self) -> str:
        return f"on request ({self.reason})" if self.reason else "on request"

    @contextmanager
    def on_signals(self, until_exit: bool = False) -> Iterator[None]:
        """Take the stop signals as requests; outside of the main thread they are left unchanged.

        `until_exit`: see `handle_stop_signals`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handle_stop_signals(self._note, until_exit):
            try:
                yield
            except KeyboardInterrupt:
                if not self.is_starting or self.reason == signal.SIGINT.name:
                    raise
                message = f"stopped by {self.reason} before training began; the same command begins again"
                raise Stopped(message) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold requests back inside, where an exception would abort the process: in C++ code that is loading."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self.is_starting and self.requested:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first, self.requested, self.reason = not self.requested, True, signal.Signals(number).name
        if self._is_held:
            return
        if self.is_starting and (is_first or number == signal.SIGINT):
            # Libraries catch an Exception wherever it comes from, in the middle of their imports too.
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)


_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_SECONDS_BETWEEN_LOOKS = 0.5


def end_with_parent(parent: int) -> None:
    """Have this process killed as soon as its parent exits.

    On Linux that is when the thread of the parent ends that started this process: it should be the main thread.
    """
    try:
        library = ctypes.CDLL(None, use_errno=True)
        is_set = library.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) == 0
    except (OSError, AttributeError):
        is_set = False
    # The parent may have ended before the line above; from then on somebody else is it.
    if os.getppid() != parent:
        os._exit(1)
    if not is_set:
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGKILL)


def open_missing_streams() -> None:
    """Open those standard streams that the process was started without, on the null device.

    Their descriptors would otherwise go to the next files that are opened, and what libraries print into those.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free: this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - stays open as the stream it replaces
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def print_error(text: object) -> None:
    """Print a line on standard error; a closed stream is ignored."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        flush_streams()


def flush_streams() -> None:
    """Write out what was printed; a stream that nobody reads any more leads to the null device from now on.

    Otherwise Python tries again when it ends, and fails with an exit code of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
        except ValueError:
            pass  # closed already


_was_enabled: list[bool] = []


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector until `resume_gc`: importing torch takes half a second less."""
    if gc.isenabled():
        _was_enabled.append(True)
    gc.disable()
    try:
        yield
    finally:
        resume_gc()


def resume_gc() -> None:
    """Resume the garbage collector for objects that are made from now on."""
    if _was_enabled:
        _was_enabled.clear()
        gc.freeze()
        gc.enable()


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names that mallopt has for them
_KEPT, _RETURNED = 1 << 28, 1 << 17
_LIMIT, _USED = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))


def keep_freed_memory() -> bool:
    """Have the C library keep up to 256 MB of freed memory; False where it has no such option.

    By default it returns large pieces to the system at once. The next activation or batch then gets fresh pages, each
    of which the system clears when it is first written to: a third of the time of a step of MobileNetV2 on a processor.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, _KEPT) for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))


def return_freed_memory() -> None:
    """Have the C library return freed memory to the system at once, as it does by default: undoes the above."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            library.mallopt(name, _RETURNED)
        library.malloc_trim(0)


def free_memory() -> int:
    """Bytes that may still be taken, of the machine and of this group of processes; no limit where none is known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = sys.maxsize
    try:
        return min(available, int(_LIMIT.read_text(encoding="ascii")) - int(_USED.read_text(encoding="ascii")))
    except (OSError, ValueError):  # there is no limit, or none that can be read
        return available


# GNU's, and that of LLVM and Intel. A few microseconds: alone about as fast as GNU's own 300,000, and beside others as
# sleeping at once, which alone costs a small network a fifth of its speed.
_SPINS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
_spins_set: list[str] = []
_torch_came_first: list[bool] = []


def limit_spinning() -> None:
    """Have idle OpenMP threads sleep after a moment, before torch loads; what the user has set stays.

    By default they spin for long. Where other processes use the same cores, that takes the time which the threads that
    are waited for need: training falls to a tenth of its speed.
    """
    if any(name in os.environ for name in ("OMP_WAIT_POLICY", *_SPINS)):
        return
    if "torch" in sys.modules:  # whose OpenMP has read the environment
        _torch_came_first.append(True)
        return
    os.environ.update(_SPINS)
    _spins_set.extend(_SPINS)


def forget_spinning() -> None:
    """Remove from the environment what `limit_spinning` set, once torch is loaded."""
    while _spins_set:
        os.environ.pop(_spins_set.pop(), None)


def spins_long() -> bool:
    """Whether torch was imported too early to limit the spinning of its threads."""
    return bool(_torch_came_first)


def num_cores() -> int:
    """How many cores this process may use."""
    return len(own_cores()) or os.cpu_count() or 1


def own_cores() -> list[int]:
    """The numbers of the cores that this process may use; none where the system does not tell (macOS)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
