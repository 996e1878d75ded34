"""How far the time left that a run logs is from the truth, where evaluations take most of the time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import paceline
from benchmarks.report import Section, at_most
from paceline.data.synthetic import write_saliency
from paceline.loggers.events import Record
from paceline.loggers.jsonl import read_records

MOST = 0.15
_IMAGES, _STEPS, _EVALUATIONS, _SAVES = 200, 200, 20, 10


class Line(NamedTuple):
    """A line of the log: the share of the steps that were done, seconds since the start, and seconds left."""

    done: float
    elapsed: float
    logged: float
    left: float

    @property
    def error(self) -> float:
        """Of the time left, as a share of it."""
        return self.logged / self.left - 1


def measure(is_quick: bool) -> Section:
    """The logged time left of one run at every tenth, beside what was left in truth."""
    with tempfile.TemporaryDirectory() as folder:
        records = _train(Path(folder), _STEPS // 4 if is_quick else _STEPS)
    lines = _lines(records)
    tenths = [next(line for line in lines if line.done >= tenth / 10 - 1e-9) for tenth in range(1, 10)]
    worst = max(abs(line.error) for line in lines)
    evaluations = [record for record in records if record["split"] == "val"]
    evaluated = sum(record["clock"]["seconds"] for record in evaluations)
    seconds = lines[-1].elapsed + lines[-1].left
    return Section(
        "Time left",
        f"saliency_sample with one thread: {records[-1]['step']} steps, {len(evaluations)} evaluations of"
        f" {evaluations[0]['num_samples']} images, {_SAVES} saves. Evaluations took {evaluated / seconds:.0%} of"
        f" {seconds:.0f} s. `eta_seconds` of `metrics.jsonl`, beside what was left in truth. The goal is that of all"
        f" {len(lines)} lines from the first tenth on; before the first evaluation, its duration is a guess.",
        ["steps done", "seconds since the start", "left, logged", "left, in truth", "error"],
        [
            [
                f"{line.done:.0%}",
                f"{line.elapsed:.0f}",
                f"{line.logged:.1f}",
                f"{line.left:.1f}",
                f"{line.error:+.1%}",
            ]
            for line in tenths
        ],
        [at_most("error of the time left, at worst", worst, MOST, "{:.1%}", is_ratio=False)],
    )


def _train(folder: Path, steps: int) -> list[Record]:
    (folder / "data").mkdir()
    write_saliency(folder / "data", _IMAGES, 0)
    changes = {
        "data.train.root": str(folder / "data"),
        "data.val.root": str(folder / "data"),
        "data.val.list_file": "train.txt",  # the larger one
        "train": {"epochs": None, "steps": steps, "threads": 1},
        "evaluate": {"every_epochs": None, "every_steps": steps // _EVALUATIONS, "batch_size": 8},
        "checkpoint": {"every_epochs": None, "every_steps": steps // _SAVES},
        "logging": {"every_steps": max(1, steps // 50), "images": False},
    }
    paceline.train(paceline.build("saliency_sample", changes, out=folder / "run"))
    return read_records(folder / "run" / "metrics.jsonl")


def _lines(records: list[Record]) -> list[Line]:
    """The lines of training from the first tenth on, except one after which nothing is left."""
    first, last = (records[place]["clock"]["time"] for place in (0, -1))
    total = records[-1]["step"]
    logged = [record for record in records if record["split"] == "train" and record["step"] >= total / 10]
    clocks = [(record["step"] / total, record["clock"]) for record in logged]
    return [
        Line(done, clock["time"] - first, clock["eta_seconds"], last - clock["time"])
        for done, clock in clocks
        if clock["time"] < last
    ]
