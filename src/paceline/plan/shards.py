"""Memory of a process among more than were rehearsed: what is kept in parts is divided further."""

from __future__ import annotations

from paceline.engine.run import Run
from paceline.plan.memory import Category, Memory

MOST_REHEARSED = 8
"""The most processes that are rehearsed: what more of them change is arithmetic."""
_IN_PARTS: tuple[Category, ...] = ("parameters", "gradients", "optimizer")


def rehearsed_processes(strategy: str, reproducible: str, processes: int) -> int:
    """The fewest processes whose rehearsal gives the memory of so many; with ddp, each holds everything."""
    is_replicated = strategy in ("auto", "ddp", "single", "dp") and reproducible != "world"
    return min(processes, 2 if is_replicated else MOST_REHEARSED)


def divide(memory: Memory, run: Run, processes: int) -> Memory:
    """What is left for the first of `processes` of what the processes of a rehearsed run cut into parts."""
    if processes == run.world.size or run.strategy.passes != "equal":
        return memory
    now, then = (_largest_part(run, number) for number in (run.world.size, processes))
    shares = {part: round(memory.parts[part] * then / now) for part in _IN_PARTS}
    return Memory({**memory.parts, **shares})


def _largest_part(run: Run, processes: int) -> int:
    """The elements of parameters that the first of so many processes keeps: rows are divided, rounded up."""
    shapes = (parameter.shape for parameter in run.model.parameters())
    return sum(-(-shape[0] // processes) * shape[1:].numel() if shape else 1 for shape in shapes)
