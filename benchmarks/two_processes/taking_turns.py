"""Has the hand-written loop take its turn within a run of ours: the same processes, one after the other.

Two runs of the same program differ by more than what is looked for; turns of one second, side by side, do not.
CASE is the hand-written loop's, TURN the steps in a turn, NOTES where process 0 writes the seconds of all turns.
"""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

_WARM_UP = 2  # turns of each that do not count


class Turns:
    """Counts the steps of our run, and after every so many has the other loop do as many."""

    def __init__(self) -> None:
        self.length, self.case = int(os.environ["TURN"]), json.loads(os.environ["CASE"])
        self.by_hand: Iterator[None] | None = None
        self.num_steps, self.began = 0, 0.0
        self.seconds: dict[str, list[float]] = {"ours": [], "by_hand": []}

    def step_ended(self, optimizer: Any, *_: Any) -> None:
        """After a step of whichever loop."""
        if self.by_hand is not None and self.by_hand.gi_running:  # type: ignore[attr-defined]
            return
        self.num_steps += 1
        if self.num_steps % self.length:
            return
        from ddp_by_hand import train  # type: ignore[import-not-found]

        self.by_hand = self.by_hand or train(self.case)
        ended = perf_counter()
        for _ in islice(self.by_hand, self.length):
            pass
        self.note(ended - self.began, perf_counter() - ended)
        self.began = perf_counter()

    def note(self, ours: float, by_hand: float) -> None:
        """A turn of each is over; keep their seconds."""
        self.seconds["ours"].append(ours)
        self.seconds["by_hand"].append(by_hand)
        if os.environ["RANK"] == "0":
            counted = {name: seconds[_WARM_UP:] for name, seconds in self.seconds.items()}
            Path(os.environ["NOTES"]).write_text(json.dumps(counted), encoding="utf-8")


if "RANK" in os.environ:  # the launcher does no steps
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(Turns().step_ended)
