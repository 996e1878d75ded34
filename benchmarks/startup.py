"""How long a person waits: for help, and for the first step."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.measuring import interleave, spread
from benchmarks.processes import PACELINE, seconds_to_exit, seconds_to_report
from benchmarks.report import Section, at_most

HELP_SECONDS, LIMIT = 0.3, 1.3
_SCRIPTS = Path(__file__).parent / "first_step"
_HELP, _OURS, _BARE = "paceline --help", "paceline train quickstart", "bare torch script"


def measure(is_quick: bool) -> Section:
    """The time to the answer of `--help`, and to the end of the first step of the quickstart."""
    rounds = 3 if is_quick else 11
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = interleave(
            {
                _HELP: lambda: seconds_to_exit([str(PACELINE), "--help"], 0, folder),
                _BARE: lambda: seconds_to_report(_SCRIPTS / "by_hand.py", folder),
                _OURS: lambda: seconds_to_report(_SCRIPTS / "with_paceline.py", folder),
            },
            rounds,
        )
    help_seconds = measured[_HELP].median
    ratios = measured[_OURS].ratios(measured[_BARE])
    ratio = statistics.median(ratios)
    return Section(
        "Starting",
        "Wall-clock time from before the process starts to the exit of `--help`, and to the end of the first optimizer"
        " step. The bare script imports torch, reads the same packed files, builds the same model and optimizer, and"
        f" does one step. Files are in the system's cache; {rounds} rounds.",
        ["what", "seconds", "ratio", "middle half"],
        [
            [_HELP, f"{help_seconds:.3f}", "", ""],
            [f"{_BARE}, first step", f"{measured[_BARE].median:.2f}", "1.00", ""],
            [f"{_OURS}, first step", f"{measured[_OURS].median:.2f}", f"{ratio:.2f}", spread(ratios)],
        ],
        [
            at_most("`--help`", help_seconds, HELP_SECONDS, "{:.2f} s", is_ratio=False),
            at_most("first step, of the bare script's", ratio, LIMIT),
        ],
    )
