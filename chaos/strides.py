"""Optimizers, precisions, strategies and averages in both memory layouts: killed or stopped, and on more processes.

Processes are forked from one that has imported everything, so that a run takes a second or two; each calls the real
command. A process ends itself in the middle of a step, while it reads a micro-batch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from chaos.row import Row
from chaos.training import bits
from paceline import cli
from paceline.core.registry import register
from paceline.data.datasets.idx import MemoryImages, fashion_small
from paceline.data.sampler import rank_range

STEPS, MICRO_BATCHES = 9, 4
RECIPE: dict[str, Any] = {
    "name": "strides",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4, 6], "dropout": 0.2},
    "data": {
        "batch_size": 16,
        "train": {"dataset": "mortal", "split": "train", "transforms": [{"name": "random_horizontal_flip"}]},
        "val": {"dataset": "mortal", "split": "test"},
    },
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "sgd", "lr": 0.01},
    "train": {"steps": STEPS, "micro_batch_size": 4, "threads": 1, "clip_grad_norm": 1.0},
    "evaluate": {"every_steps": STEPS},
    "checkpoint": {"every_steps": 3, "keep_last": 9},
    "logging": {"every_steps": 1, "images": False, "tensorboard": False},
}
LONGEST = 120.0
"""Seconds after which a run counts as stuck."""
WORLD = "train.reproducible=world"
STRATEGIES: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "ddp": (2, []),
    "ddp on 3": (3, []),
    "fsdp": (2, ["train.strategy=fsdp"]),
    "zero": (2, ["train.strategy=zero"]),
    "world": (2, [WORLD]),
}
"""How many processes, and what the recipe says."""
OPTIMIZERS = ["sgd", "adamw", "adagrad", "timm/lamb", "adam", "muon", "rmsprop"]
PRECISIONS = ["fp32", "bf16", "fp16", "O2"]
AVERAGES = ["none", "{name: ema, decay: 0.9}", "{name: swa, start: 3, every_steps: 2}"]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["chaos.strides", "paceline.recipe.build", "paceline.engine.strategies.fsdp", "torch._inductor.config"]
)


class Case(NamedTuple):
    """One combination."""

    strategy: str
    precision: str
    optimizer: str
    averaging: str
    channels_last: bool

    @property
    def procs(self) -> int:
        """On how many processes it runs."""
        return STRATEGIES[self.strategy][0]

    def words(self) -> list[str]:
        """What it says beside the recipe."""
        return [
            *STRATEGIES[self.strategy][1],
            f"train.precision={self.precision}",
            f"optimizer.name={self.optimizer}",
            f"train.averaging={self.averaging}",
            f"train.channels_last={json.dumps(self.channels_last)}",
        ]


class Deed(NamedTuple):
    """What a process does to itself at which of its reads, counted from 1."""

    rank: int
    read: int
    number: signal.Signals


def cases() -> list[Case]:
    """Every strategy with every precision, and optimizers and averages in turn; each in both layouts."""
    others = zip(cycle(OPTIMIZERS), cycle(AVERAGES), strict=False)
    found = []
    for (strategy, precision), (optimizer, averaging) in zip(product(STRATEGIES, PRECISIONS), others, strict=False):
        allowed = "O1" if precision == "O2" and strategy in ("fsdp", "zero") else precision
        found += [Case(strategy, allowed, optimizer, averaging, layout) for layout in (False, True)]
    return found


def run(quick: bool) -> list[Row]:
    """Interruptions, and `reproducible: world` on several numbers of processes."""
    generator = random.Random(23)
    chosen = generator.sample(cases(), 4) if quick else cases()
    shared = [case for case in cases() if case.strategy == "world"]
    with tempfile.TemporaryDirectory() as name:
        broken = [_judge(case, interrupt(case, Path(name) / str(at), generator)) for at, case in enumerate(chosen)]
        shared = shared[:1] if quick else shared
        spread = [_judge(case, spread_out(case, Path(name) / f"world-{at}")) for at, case in enumerate(shared)]
    return [
        Row(
            "optimizers × precisions × strategies × averages, with and without `channels_last`: a rank killed or asked"
            " to stop at a random read, then started again",
            "weights, optimizer, average and metrics as in the uninterrupted run",
            f"{sum(broken)}/{len(broken)}, {sum(case.channels_last for case in chosen)} with `channels_last`",
            all(broken),
        ),
        Row(
            "optimizers × precisions × averages, `reproducible: world`, with and without `channels_last`: on 1, 2 and 3"
            " processes",
            "bit-identical",
            f"{sum(spread)}/{len(spread)}",
            all(spread),
        ),
    ]


def _judge(case: Case, problem: str | None) -> bool:
    if problem:
        print(f"{case}: {problem}", flush=True)
    return problem is None


def interrupt(case: Case, folder: Path, generator: random.Random) -> str | None:
    """What differs between a whole run and one that was killed or stopped and started again, if anything."""
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    rank = generator.randrange(case.procs)
    begin, end = rank_range(MICRO_BATCHES, rank, case.procs)
    read = generator.randint(end - begin + 1, 8 * (end - begin))  # in the steps from the second to the eighth
    number, expected = generator.choice([(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)])
    codes = start(folder, "broken", case.procs, case.words(), Deed(rank, read, number))
    if codes[rank] != expected:
        return f"{number.name} ended rank {rank} with {codes}: {_output(folder, 'broken')}"
    for out in ("broken", "whole"):
        codes = start(folder, out, case.procs, case.words())
        if any(codes):
            return f"{out} ended with {codes}: {_output(folder, out)}"
    return _difference(folder, "whole", "broken")


def spread_out(case: Case, folder: Path) -> str | None:
    """What differs between runs on one, two and three processes, if anything."""
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    for procs in (1, 2, 3):
        codes = start(folder, f"on-{procs}", procs, case.words())
        if any(codes):
            return f"on {procs} processes ended with {codes}: {_output(folder, f'on-{procs}')}"
    return _difference(folder, "on-1", "on-2") or _difference(folder, "on-1", "on-3")


def start(folder: Path, out: str, procs: int, words: list[str], deed: Deed | None = None) -> list[int]:
    """Train with the recipe in a folder; the exit codes of all processes."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    ranks = [_FORKS.Process(target=_train, args=(folder, out, words, rank, procs, port, deed)) for rank in range(procs)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LONGEST)
        process.kill()
        process.join()
    return [process.exitcode or 0 for process in ranks]


def _train(folder: Path, out: str, words: list[str], rank: int, procs: int, port: int, deed: Deed | None) -> None:
    """One process of a run."""
    os.chdir(folder)
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if procs > 1:
        place = {"RANK": rank, "WORLD_SIZE": procs, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
    Mortal.deed = deed if deed and deed.rank == rank else None
    register.dataset("mortal")(mortal)
    code = cli.main(["train", "recipe.json", "--out", out, *words])
    sys.stdout.flush()
    os._exit(code)  # threads of gloo may still let go of tensors while the interpreter is taken down


class Mortal(MemoryImages):
    """Images in memory; the process that reads them may end with it."""

    deed: Deed | None = None
    reads = 0

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """The images of these samples."""
        self.reads += 1
        if self.deed is not None and self.reads == self.deed.read:
            os.kill(os.getpid(), self.deed.number)
        return super().gather(ids)


def mortal(split: str) -> Mortal:
    """The first images of the embedded data set."""
    base = fashion_small(split)  # type: ignore[arg-type]
    number = 400 if split == "train" else 60
    return Mortal(base.images[:number], {"label": base.fields["label"][:number]}, base.classes)


def _difference(folder: Path, one: str, other: str) -> str | None:
    """Where two runs differ in their last checkpoints or their metrics."""
    ends = []
    for out in (one, other):
        found = bits(folder / out)
        ends.append({name: value for name, value in found.items() if name == "metrics" or f"{STEPS:08d}" in name})
    different = [name for name in ends[0] if ends[0][name] != ends[1].get(name)]
    if len(ends[0]) < 3 or len(ends[0]) != len(ends[1]):
        return f"saved {sorted(ends[0])} and {sorted(ends[1])}"
    return f"differs in {', '.join(different)}" if different else None


def _output(folder: Path, out: str) -> str:
    return (folder / f"{out}.log").read_text()[-1500:]
