"""What a checkpoint costs the training that goes on: the time it stands still, and how much slower steps are."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from benchmarks.measuring import Measured, interleave, spread
from benchmarks.report import Section, at_most
from paceline.checkpoint.state import Tree, optimizer_tree
from paceline.checkpoint.store import Store
from paceline.checkpoint.writer import Saver

LIMIT = 0.2
_WIDTH, _BLOCKS, _BATCH = 720, 16, 256  # 8.3 million parameters: 100 MB with the two averages of AdamW
_QUIET_STEPS = 5
_TORCH, _COPIED = "torch.save + fsync", "copied, then written in the background"


class Training:
    """A network whose parameters and optimizer state take 100 MB, with its checkpoints."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(_BLOCKS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.samples = torch.randn(_BATCH, _WIDTH)
        self.folder, self.num_saves = folder, 0
        self.saver = Saver(Store(folder / "checkpoints", keep_last=1))
        self.quiet, self.busy = Measured("a step", []), Measured("a step while a checkpoint is written", [])
        self.step()

    def state(self) -> Tree:
        return {"optimizer": optimizer_tree(self.optimizer, self.model)}

    def step(self) -> float:
        """The seconds of a step."""
        begin = perf_counter()
        self.optimizer.zero_grad()
        self.model(self.samples).square().mean().backward()
        self.optimizer.step()
        return perf_counter() - begin

    def save_with_torch(self) -> float:
        self.step()
        begin = perf_counter()
        with (self.folder / "by_torch.pt").open("wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        return perf_counter() - begin

    def save(self) -> float:
        """The seconds for which training stands still; how steps fare until all is written is noted too."""
        quiet = statistics.median(self.step() for _ in range(_QUIET_STEPS))
        self.num_saves += 1
        begin = perf_counter()
        self.saver.start(self.num_saves, self.model.state_dict(), self.state(), {})
        blocked = perf_counter() - begin
        busy = [self.step()]
        while not (outcomes := self.saver.poll()):
            busy.append(self.step())
        assert outcomes[0].error is None
        self.quiet.costs.append(quiet)
        self.busy.costs.append(statistics.mean(busy))
        return blocked


def measure(is_quick: bool) -> Section:
    """How long training stands still for a checkpoint of 100 MB, against the plain way."""
    torch.set_num_threads(1)
    rounds = 3 if is_quick else 15
    with tempfile.TemporaryDirectory() as name:
        training = Training(Path(name))
        measured = interleave({_TORCH: training.save_with_torch, _COPIED: training.save}, rounds)
    ratios = measured[_COPIED].ratios(measured[_TORCH])
    ratio = statistics.median(ratios)
    return Section(
        "Saving",
        "The time that training waits while 100 MB of parameters and optimizer state are saved. A low-priority thread"
        " writes the file while steps continue."
        f" One compute thread, {rounds} rounds.",
        ["what", "ms", "ratio", "middle half"],
        [
            *[_row(way, measured[_TORCH]) for way in measured.values()],
            *[_row(steps, training.quiet) for steps in (training.quiet, training.busy)],
        ],
        [at_most(f"the time that training waits, of {_TORCH}", ratio, LIMIT, "{:.1%}")],
    )


def _row(way: Measured, reference: Measured) -> list[str]:
    ratios = way.ratios(reference)
    return [way.name, f"{way.median * 1e3:.1f}", f"{statistics.median(ratios):.3f}", spread(ratios)]
