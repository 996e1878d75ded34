"""A contestant of the step benchmark in a process of its own, as a user would run it.

In one process, the memory that one framework leaves behind slows the others: where the allocator puts what a step needs
is several percent of a small step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_ROOT = Path(__file__).parent.parent


class ContestantProcess:
    """A process that trains whenever it is asked to, and says how long a step took."""

    def __init__(self, place: str, model: str, batch: int, warm_up: int, steps: int) -> None:
        """`place` is the module and function of the contestant, as "peers:ignite"."""
        words = [place, model, str(batch), str(warm_up), str(steps)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def turn(self) -> float:
        """Train once; the seconds of a step after the warm-up."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("train", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a contestant failed:\n{self._process.communicate()[1]}")
        return float(answer)


def main(place: str, model: str, batch: int, warm_up: int, steps: int) -> None:
    """Take turns until standard input ends. Whatever contestants print goes nowhere, but errors are kept."""
    from pkgutil import resolve_name

    import torch

    from benchmarks import nets
    from benchmarks.contest import Contest

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    contestant = resolve_name(f"benchmarks.{place}")
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(model, batch, warm_up + steps + 1, Path(folder))
        for _ in sys.stdin:
            nets.moments.clear()
            contestant(contest)
            assert len(nets.moments) == contest.steps, "a contestant did not do all the steps"
            print((nets.moments[-1] - nets.moments[warm_up]) / steps, file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))  # type: ignore[arg-type]
