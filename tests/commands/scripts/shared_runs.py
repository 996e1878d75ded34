"""One of two processes: does many short runs from recipes, shared and alone, and writes what came out of each."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import shared_parts  # registers its names

from paceline.checkpoint.reader import open_checkpoint
from paceline.core.errors import PacelineError, Stopped
from paceline.core.world import World, join
from paceline.engine.loop import train
from paceline.engine.run import Run
from paceline.engine.watchdog import EVALUATING, NoHeartbeat
from paceline.loggers.events import Evaluated, Event, Logged, Logger, LoggerGroup
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate

RECIPE = {
    "name": "shared",
    "task": "classification",
    "model": {"name": "flat"},
    "data": {
        "batch_size": 16,
        "train": {"dataset": "few", "split": "train", "count": 44, "transforms": [{"name": "random_horizontal_flip"}]},
        "val": {"dataset": "few", "split": "test"},
    },
    "losses": [{"name": "cross_entropy", "label_smoothing": 0.1}],
    "optimizer": {"name": "adamw", "lr": 0.01},
    "train": {"steps": 6, "micro_batch_size": 5, "clip_grad_norm": 1.0, "threads": 1},
    "evaluate": {"every_steps": 6, "batch_size": 60},
    "checkpoint": {"every_steps": 3, "keep_last": 9},
    "logging": {"every_steps": 1, "images": False, "tensorboard": False},
}
ALONE = World(0, 1, 0, torch.device("cpu"))
CONVNET = ("model={name: convnet, widths: [4, 6], dropout: 0.2}", "train.steps=3")
STATIC = "train.strategy={name: ddp, static_graph: true}"
AVERAGED = "train.averaging={name: ema, decay: 0.8}"
GENTLE = "losses=[{name: cross_entropy, weight: 0.1}]"  # nothing overflows that is not made to
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "O0", "O1", "O2", "O3")
WITH_PARTS = PRECISIONS[:6]
UNFROZEN = [
    "model.freeze=[all_but_head]",
    "model.unfreeze=[{match: ['3'], at_steps: 2}, {match: ['2'], at_steps: 4}]",
]
HALVED: dict[str, Sequence[str]] = {
    "plain": ["fsdp"],
    "fsdp": ["{name: fsdp, parameters: bf16}"],
    "zero": ["{name: zero, parameters: bf16, gradients: bf16}"],
    "sync_bn": ["{name: fsdp, parameters: bf16}", "train.sync_bn=true", "train.micro_batch_size=8"],
}

EQUAL: dict[str, Sequence[str]] = {
    "sgd": ["optimizer={name: sgd, lr: 0.1, momentum: 0.9}"],
    "unfreezing": UNFROZEN,
    "averaging": [AVERAGED],
    "channels_last": [*CONVNET, "train.channels_last=true"],
}


class Memory(Logger):
    """Keeps the metrics of a run."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.evaluated: dict[str, float] = {}

    def handle(self, event: Event) -> None:
        if isinstance(event, Logged):
            self.logged.append(dict(event.metrics))
        elif isinstance(event, Evaluated):
            self.evaluated = dict(event.metrics)


@dataclass
class Done:
    """A run that is finished."""

    run: Run
    memory: Memory
    weights: dict[str, Tensor]
    state: dict[str, Any]

    def column(self, name: str) -> list[float]:
        return [metrics[name] for metrics in self.memory.logged]

    def bits(self) -> str:
        """A hash of the weights and of all that resumes, but for where it was written."""
        kept = {name: part for name, part in self.state.items() if name not in ("recipe", "world")}
        return _hash([self.weights, kept])

    def distance(self, other: Done) -> float:
        """The greatest difference of what is learned; running statistics belong to processes."""
        pairs = [(self.weights[name], other.weights[name]) for name, _ in self.run.state.model.named_parameters()]
        average = other.state["averaging"].get("average", {})
        pairs += [(self.state["averaging"]["average"][name], average[name]) for name in average]
        return max((one.double() - another.double()).abs().max().item() for one, another in pairs)


class Bench:
    """Does runs in a folder of their own each."""

    def __init__(self, world: World, out: Path) -> None:
        self.world, self.out = world, out
        self.found: dict[str, Any] = {}

    def build(self, name: str, *overrides: str, alone: bool = False) -> Run:
        world = ALONE if alone else self.world
        folder = self.out / (f"{name} alone {self.world.rank}" if alone else name)
        return Builder(validate(load(str(self.out / "recipe.json"), list(overrides))), world).run(folder)

    def run(self, name: str, *overrides: str, alone: bool = False, start: Path | None = None) -> Done:
        run = self.build(name, *overrides, alone=alone)
        if start:
            run.restore(open_checkpoint(start))
        return self.finish(run)

    def finish(self, run: Run) -> Done:
        memory = Memory()
        run.logger = LoggerGroup([memory])
        train(run)
        run.logger.close()
        run.strategy.part = run.strategy.whole  # type: ignore[method-assign]  # all of the state, to be compared
        done = Done(run, memory, run.state.model_state_dict(), run.state.state_dict())
        self.world.barrier()
        return done

    def refused(self, *overrides: str) -> tuple[int, str]:
        """The exit code that a run which cannot be done means, and what it says."""
        try:
            self.run("refused", *overrides)
        except PacelineError as error:
            return error.exit_code, str(error)
        return 0, ""


def precisions(bench: Bench) -> Iterator[tuple[str, Any]]:
    for strategy, names in (("ddp", PRECISIONS), ("fsdp", WITH_PARTS), ("zero", ("bf16", "O1"))):
        for name in names:
            overrides = [f"train.strategy={strategy}", f"train.precision={name}", "train.steps=4"]
            done = bench.run(f"{strategy} {name}", *overrides)
            yield f"{strategy} {name}", {"losses": done.column("loss"), "bits": done.bits()}


def checkpointing(bench: Bench) -> Iterator[tuple[str, Any]]:
    blocks = "train.activation_checkpointing=blocks"
    for strategy in ("train.strategy=ddp", "train.strategy=fsdp", STATIC):
        for precision in ("fp32", "bf16"):
            overrides = [*CONVNET, strategy, f"train.precision={precision}"]
            plain = bench.run(f"plain {strategy} {precision}", *overrides)
            again = bench.run(f"blocks {strategy} {precision}", *overrides, blocks)
            yield f"{strategy} {precision}", [_hash(plain.weights), _hash(again.weights)]


def equal_to_one_process(bench: Bench) -> Iterator[tuple[str, Any]]:
    for name, overrides in EQUAL.items():
        alone = bench.run(name, *overrides, alone=True)
        for strategy in ("train.strategy=ddp", "train.strategy=fsdp", STATIC):
            done = bench.run(f"{name} {strategy}", *overrides, strategy)
            yield f"{name} {strategy}", done.distance(alone)


def resuming(bench: Bench) -> Iterator[tuple[str, Any]]:
    for strategy in ("ddp", "fsdp", "zero"):
        whole, resumed = _interrupted(bench, strategy, f"train.strategy={strategy}", AVERAGED, *UNFROZEN)
        yield strategy, {"bits": [whole.bits(), resumed.bits()], "evaluated": whole.memory.evaluated}
    for strategy in ("train.strategy=ddp", "train.strategy=fsdp", "train.reproducible=world"):
        words = (CONVNET[0], strategy, AVERAGED, "train.channels_last=true")
        whole, resumed = _interrupted(bench, f"channels_last {strategy}", *words)
        yield f"channels_last {strategy}", {"bits": [whole.bits(), resumed.bits()]}


def half_parameters(bench: Bench) -> Iterator[tuple[str, Any]]:
    """BatchNorm among parameters that travel and compute as bfloat16."""
    for name, (strategy, *more) in HALVED.items():
        done = bench.run(f"half {name}", *CONVNET, f"train.strategy={strategy}", *more)
        yield name, {"bits": done.bits(), "losses": done.column("loss")}


class StopRequest(NoHeartbeat):
    """Asks a run to stop when this process has measured a number of batches."""

    def __init__(self, run: Run, batches: int) -> None:
        self.run, self.left = run, batches

    def beat(self, step: int, phase: str) -> None:
        self.left -= phase == EVALUATING
        self.run.stop.requested |= self.left == 0


def evaluations(bench: Bench) -> Iterator[tuple[str, Any]]:
    """One of the processes is asked to stop: while it measures the weights, and later while it does their average."""
    for strategy in ("train.strategy=ddp", "train.strategy=fsdp", "train.reproducible=world"):
        overrides = [strategy, AVERAGED, "evaluate.every_steps=3", "evaluate.batch_size=15"]
        whole = bench.run(f"measured {strategy}", *overrides)
        stops = []
        for batches in (3, 9):
            run = bench.build(f"asked {strategy}", *overrides)
            _continue(run)
            if bench.world.rank == 1:
                run.heartbeat = StopRequest(run, batches)
            try:
                train(run)
            except Stopped as stopped:
                saved = run.store.newest()
                assert saved is not None
                stops.append([stopped.exit_code, saved.step, saved.state["pending"]])
            bench.world.barrier()
        run = bench.build(f"asked {strategy}", *overrides)
        _continue(run)
        done = bench.finish(run)
        bits = [whole.bits(), done.bits()]
        index = [whole.run.store.index(), done.run.store.index()]
        yield strategy, {"stops": stops, "bits": bits, "index": index}


def _continue(run: Run) -> None:
    checkpoint = run.store.newest()
    if checkpoint is not None:
        run.restore(checkpoint)


def overflows(bench: Bench) -> Iterator[tuple[str, Any]]:
    marked = ["model.name=fragile", "data.train.marked=true", "train.precision=fp16", GENTLE]
    for strategy in ("train.strategy=ddp", "train.strategy=fsdp", "train.reproducible=world"):
        whole, resumed = _interrupted(bench, f"overflow {strategy}", *marked, strategy)
        yield (
            strategy,
            {
                "skipped": whole.column("skipped_updates"),
                "scale": whole.column("loss_scale"),
                "resumed": resumed.column("loss_scale"),
                "bits": [whole.bits(), resumed.bits()],
                "steps": _marked_updates(whole.run),
            },
        )


def _interrupted(bench: Bench, name: str, *overrides: str) -> tuple[Done, Done]:
    """A run, and another that begins with its first checkpoint."""
    whole = bench.run(name, *overrides)
    start = bench.out / name / "checkpoints" / "step-00000003"
    return whole, bench.run(f"{name} resumed", *overrides, start=start)


def _marked_updates(run: Run) -> list[int]:
    """The steps, counted from 0, that the marked sample belongs to."""
    updates, order = run.batches.sampler, run.batches.order
    places = [order.at(epoch, 0, updates.size).tolist().index(shared_parts.MARKED) for epoch in range(2)]
    return [epoch * updates.steps_per_epoch + place // updates.batch for epoch, place in enumerate(places)]


def mistakes(bench: Bench) -> Iterator[tuple[str, Any]]:
    for strategy in ("train.strategy=ddp", "train.strategy=fsdp", "train.strategy=zero", "train.reproducible=world"):
        yield f"growing {strategy}", bench.refused("model.name=growing", strategy)
    yield "single", bench.refused("train.strategy=single")
    yield "dp", bench.refused("train.strategy=dp")
    yield "normless", bench.refused("model.name=normless", "train.sync_bn=true")
    yield "small last step", bench.refused("train.sync_bn=true", "data.train.count=49")
    yield "one micro-batch", bench.refused("train.micro_batch_size=16")
    yield "one sample", bench.refused("data.batch_size=1", "train.micro_batch_size=1")


def _hash(tree: Any) -> str:
    digest = hashlib.sha256()
    _digest(tree, digest)
    return digest.hexdigest()


def _digest(tree: Any, digest: Any) -> None:
    if isinstance(tree, Tensor):
        digest.update(f"{tree.dtype} {tuple(tree.shape)}".encode())
        digest.update(tree.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(tree, dict):
        for name in sorted(tree):
            digest.update(name.encode())
            _digest(tree[name], digest)
    elif isinstance(tree, list | tuple):
        for each in tree:
            _digest(each, digest)
    else:
        digest.update(repr(tree).encode())


def main(out: Path) -> None:
    world = join("cpu")
    bench = Bench(world, out)
    if world.is_main:
        (out / "recipe.json").write_text(json.dumps(RECIPE), encoding="utf-8")
    world.barrier()
    found = {}
    parts = (
        precisions,
        checkpointing,
        equal_to_one_process,
        resuming,
        evaluations,
        half_parameters,
        overflows,
        mistakes,
    )
    for part in parts:
        found[part.__name__] = dict(part(bench))
    (out / f"rank-{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    world.barrier()
    os._exit(0)  # threads of gloo may still let go of tensors while the interpreter is taken down


if __name__ == "__main__":
    main(Path(sys.argv[1]))
