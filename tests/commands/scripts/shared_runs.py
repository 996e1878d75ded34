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

from paceline.checkpoint.store import open_checkpoint
from paceline.core.errors import PacelineError
from paceline.core.mesh import Mesh, join
from paceline.engine.loop import train
from paceline.engine.run import Run
from paceline.observe.events import Evaluated, Event, Logged, Observer, Snapshot
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate

RECIPE = {
    "name": "shared",
    "task": "classification",
    "model": {"name": "flat"},
    "data": {
        "batch": 16,
        "train": {"dataset": "few", "split": "train", "count": 44, "transforms": [{"name": "flip"}]},
        "val": {"dataset": "few", "split": "test"},
    },
    "losses": [{"name": "cross_entropy", "label_smoothing": 0.1}],
    "optimizer": {"name": "adamw", "lr": 0.01},
    "train": {"steps": 6, "micro_batch": 5, "clip_norm": 1.0, "threads": 1},
    "evaluate": {"every_steps": 6, "batch": 60},
    "checkpoint": {"every_steps": 3, "keep_last": 9},
    "observe": {"log_every_steps": 1, "pictures": False, "tensorboard": False},
}
ALONE = Mesh(0, 1, 0, torch.device("cpu"))
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

EQUAL: dict[str, Sequence[str]] = {
    "sgd": ["optimizer={name: sgd, lr: 0.1, momentum: 0.9}"],
    "unfreezing": UNFROZEN,
    "averaging": [AVERAGED],
    "channels_last": [*CONVNET, "train.channels_last=true"],
}


class Memory:
    """Keeps the figures of a run."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.evaluated: dict[str, float] = {}

    def handle(self, event: Event) -> None:
        if isinstance(event, Logged):
            self.logged.append(dict(event.figures))
        elif isinstance(event, Evaluated):
            self.evaluated = dict(event.figures)

    def tick(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


@dataclass
class Done:
    """A run that is finished."""

    run: Run
    memory: Memory
    weights: dict[str, Tensor]
    state: dict[str, Any]

    def column(self, name: str) -> list[float]:
        return [figures[name] for figures in self.memory.logged]

    def bits(self) -> str:
        """A hash of the weights and of all that resumes, but for where it was written."""
        kept = {name: part for name, part in self.state.items() if name not in ("recipe", "world")}
        return _hash([self.weights, kept])

    def distance(self, other: Done) -> float:
        """The greatest difference of what is learned; running statistics belong to processes."""
        pairs = [(self.weights[name], other.weights[name]) for name, _ in self.run.masters.named_parameters()]
        average = other.state["averaging"].get("average", {})
        pairs += [(self.state["averaging"]["average"][name], average[name]) for name in average]
        return max((one.double() - another.double()).abs().max().item() for one, another in pairs)


class Bench:
    """Does runs in a folder of their own each."""

    def __init__(self, mesh: Mesh, out: Path) -> None:
        self.mesh, self.out = mesh, out
        self.found: dict[str, Any] = {}

    def run(self, name: str, *overrides: str, alone: bool = False, start: Path | None = None) -> Done:
        mesh = ALONE if alone else self.mesh
        folder = self.out / (f"{name} alone {self.mesh.rank}" if alone else name)
        run = Builder(validate(load(str(self.out / "recipe.json"), list(overrides))), mesh).run(folder)
        if start:
            run.restore(open_checkpoint(start))
        memory = Memory()
        run.observer = Observer([memory])
        train(run)
        run.observer.close()
        run.parallel.part = run.parallel.whole  # type: ignore[method-assign]  # all of the state, to be compared
        done = Done(run, memory, run.model_state(), run.state())
        self.mesh.barrier()
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
    blocks = "model.checkpointing=blocks"
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
                "updates": _marked_updates(whole.run),
            },
        )


def _interrupted(bench: Bench, name: str, *overrides: str) -> tuple[Done, Done]:
    """A run, and another that begins with its first checkpoint."""
    whole = bench.run(name, *overrides)
    start = bench.out / name / "checkpoints" / "step-00000003"
    return whole, bench.run(f"{name} resumed", *overrides, start=start)


def _marked_updates(run: Run) -> list[int]:
    """The updates, counted from 0, that the marked sample belongs to."""
    updates, order = run.batches.updates, run.batches.order
    places = [order.at(epoch, 0, updates.size).tolist().index(shared_parts.MARKED) for epoch in range(2)]
    return [epoch * updates.steps_per_epoch + place // updates.batch for epoch, place in enumerate(places)]


def mistakes(bench: Bench) -> Iterator[tuple[str, Any]]:
    for strategy in ("train.strategy=ddp", "train.strategy=fsdp", "train.strategy=zero", "train.reproducible=world"):
        yield f"growing {strategy}", bench.refused("model.name=growing", strategy)
    yield "single", bench.refused("train.strategy=single")
    yield "dp", bench.refused("train.strategy=dp")
    yield "normless", bench.refused("model.name=normless", "train.sync_bn=true")
    yield "small last update", bench.refused("train.sync_bn=true", "data.train.count=49")
    yield "one micro-batch", bench.refused("train.micro_batch=16")
    yield "one sample", bench.refused("data.batch=1", "train.micro_batch=1")


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
    mesh = join("cpu")
    bench = Bench(mesh, out)
    if mesh.is_main:
        (out / "recipe.json").write_text(json.dumps(RECIPE), encoding="utf-8")
    mesh.barrier()
    found = {}
    for part in (precisions, checkpointing, equal_to_one_process, resuming, overflows, mistakes):
        found[part.__name__] = dict(part(bench))
    (out / f"rank-{mesh.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    mesh.barrier()
    os._exit(0)  # threads of gloo may still let go of tensors while the interpreter is taken down


if __name__ == "__main__":
    main(Path(sys.argv[1]))
