"""`python -m benchmarks [NAME …] [--quick]`: measure, print tables, and after a full run write the page of results."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time

from benchmarks.page import installed, save
from benchmarks.report import show

NAMES = (
    "step",
    "loader",
    "images",
    "image_training",
    "video",
    "startup",
    "sampler",
    "validation",
    "optimizers",
    "memory",
    "plan",
    "plan_minet",
    "saving",
    "sharing",
    "busy",
    "eta",
    "saliency",
    "predict",
    "precisions",
    "pixel_precisions",
    "task_precisions",
)
"""In the order of the page; the long trainings come last, where a run that is cut short loses them alone."""
MOST_MINUTES = 15.0
"""After so long a benchmark that is one of several is ended, so that a hang does not cost the others their turn."""


def main() -> None:
    """Run the benchmarks that are asked for, or all of them."""
    parser = argparse.ArgumentParser("benchmarks", description="How fast Paceline is.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works, not to quote")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(NAMES)}")
    missing = [name for name, version in installed().items() if version is None]
    if missing:  # better known now than after an hour
        parser.error(f"not installed: {', '.join(missing)}. `make bench` makes an environment that has everything")
    if len(options.names) == 1:
        run(options.names[0], options.quick)
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the benchmark of the moment ends too
        sys.exit(run_all(options.names or NAMES, options.quick))


def run(name: str, is_quick: bool) -> None:
    """Run one benchmark in this process."""
    begin = time.monotonic()
    section = importlib.import_module(f"benchmarks.{name}").measure(is_quick)
    show(section)
    if not is_quick:  # a quick run leaves the page as it is
        save(name, section, time.monotonic() - begin, NAMES)


def run_all(names: list[str] | tuple[str, ...], is_quick: bool) -> int:
    """Run each in a process of its own, so that none finds another's threads or settings; 1 if any failed."""
    begin, failed = time.monotonic(), []
    for number, name in enumerate(names, start=1):
        start = time.monotonic()
        print(f"\n[{number} of {len(names)}] {name}, {_clock(start - begin)} since the start", flush=True)
        problem = _run_apart(name, is_quick)
        took = _clock(time.monotonic() - start)
        print(f"[{number} of {len(names)}] {name}: {problem or 'done'} after {took}", flush=True)
        if problem:
            failed.append(f"{name} {problem}")
    print(f"\nAll of it took {_clock(time.monotonic() - begin)}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _run_apart(name: str, is_quick: bool) -> str:
    """Run a benchmark in a new process; what went wrong, or nothing."""
    command = [sys.executable, "-m", "benchmarks", name, *["--quick"] * is_quick]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(MOST_MINUTES * 60)
        except subprocess.TimeoutExpired:
            return f"was ended after {MOST_MINUTES:g} minutes"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
    return f"ended with {code}" if code else ""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    main()
