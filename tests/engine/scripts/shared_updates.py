"""One of several processes: takes the same updates with every strategy and compares each with the whole batch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from small_runs import NUM_CLASSES, PlainNet, Small, SoftDice, grouped, solver

from paceline.core.mesh import Mesh, join
from paceline.data.loading.loader import Update
from paceline.engine.ordered import OrderedTree
from paceline.engine.parallel import Replicated, SingleProcess
from paceline.engine.run import Run
from paceline.engine.sharded import Sharded
from paceline.engine.step import train_step
from paceline.engine.tally import read
from paceline.losses.classification import CrossEntropy
from paceline.models.sync_norm import convert_sync_batchnorm
from paceline.optim.clipping import Unclipped

Strategy = Callable[[nn.Module, Mesh], SingleProcess]
STRATEGIES: dict[str, Strategy] = {
    "ddp": Replicated,
    "ddp, static graph": lambda model, mesh: Replicated(model, mesh, static_graph=True),
    "ddp, unused parameters looked for": lambda model, mesh: Replicated(model, mesh, find_unused=True),
    "ddp, tiny buckets": lambda model, mesh: Replicated(model, mesh, bucket_mb=0.0001),
    "fsdp": lambda model, mesh: Sharded(model, mesh, [[model.get_submodule("layers.0")]]),
    "zero": lambda model, mesh: Sharded(model, mesh, [], keeps_parameters=True),
    "ordered": OrderedTree,
}
# Samples in the data set and micro-batch: one a process, several, unequal numbers, and an update that is too small.
CUTS = {"one each": (64, 32), "accumulated": (64, 8), "unequal": (64, 13), "one sample at the end": (65, 8)}


class BatchNormed(nn.Module):
    """Its gradients are those of a whole batch only if statistics are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Tanh(), nn.Flatten(), nn.Linear(80, NUM_CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.layers(images)
        return logits


def main(out: Path) -> None:
    """Write what was found by each process."""
    mesh = join("cpu")
    found: dict[str, Any] = {"ids": [], "cases": {}}
    for strategy, make in STRATEGIES.items():
        for cut, (size, micro_batch) in CUTS.items():
            for losses in ("cross entropy", "dice"):
                found["cases"][f"{strategy}, {cut}, {losses}"] = _compare(mesh, make, size, micro_batch, losses)
    found["cases"]["sync_bn"] = _compare_statistics(mesh)
    small = Small(out, size=50, batch=17, micro_batch=4, steps=6, world=mesh.world, rank=mesh.rank)
    found["ids"] = [
        [int(i) for micro in update.microbatches for i in micro.batch.ids] for update in small.run().batches
    ]
    (out / f"rank-{mesh.rank}.json").write_text(json.dumps(found))
    mesh.barrier()
    os._exit(0)


def _compare(mesh: Mesh, make: Strategy, size: int, micro_batch: int, losses: str) -> float:
    """The greatest difference of gradients, norms and losses from the whole batch's over two updates."""
    chosen = {"dice": (SoftDice(), 0.7)} if losses == "dice" else {}
    small = Small(
        Path(), size, micro_batch=micro_batch, losses={**chosen, "cross_entropy": (CrossEntropy(), 1.3)}, steps=2
    )
    run, oracle = _shared(small, mesh, make), small.run()
    worst = 0.0
    for update, whole in zip(run.batches, oracle.batches, strict=True):
        expected, expected_loss = _whole(oracle, whole, losses)
        gradients, norm, loss = _step(run, update)
        differences = [(one - other).abs().max().item() for one, other in zip(gradients, expected, strict=True)]
        total = torch.cat([each.reshape(-1) for each in expected]).norm().item()
        worst = max(worst, *differences, abs(norm - total), abs(loss - expected_loss))
        oracle.progress.step += 1
        with torch.no_grad():
            for parameter, gradient in zip(oracle.model.parameters(), expected, strict=True):
                parameter.sub_(0.1 * gradient)
    weights = zip(run.model.parameters(), oracle.model.parameters(), strict=True)
    return max(worst, *((run.parallel.whole(one) - other).abs().max().item() for one, other in weights))


def _compare_statistics(mesh: Mesh) -> float:
    """The same for BatchNorm over all processes: statistics, too, are those of the whole batch."""
    small = Small(Path(), 64, micro_batch=-(-64 // mesh.world), net=BatchNormed, steps=2)
    torch.manual_seed(0)
    model = BatchNormed().double()
    convert_sync_batchnorm(model)
    run = _around(small, mesh, model, Replicated)
    alone = small.run()
    for update, whole in zip(run.batches, alone.batches, strict=True):
        train_step(run, update)
        batch = alone.source.fetch(0, torch.cat([micro.batch.ids for micro in whole.microbatches]).numpy())
        loss = nn.functional.cross_entropy(alone.model(batch["image"]), batch["label"])
        gradients = torch.autograd.grad(loss, list(alone.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(alone.model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        alone.progress.step += 1
    pairs = zip(model.state_dict().values(), alone.model.state_dict().values(), strict=True)
    return float(max((one.double() - other.double()).abs().max().item() for one, other in pairs))


def _shared(small: Small, mesh: Mesh, make: Strategy) -> Run:
    torch.manual_seed(0)
    return _around(small, mesh, PlainNet().double(), make)


def _around(small: Small, mesh: Mesh, model: nn.Module, make: Strategy) -> Run:
    parallel = make(model, mesh)
    run = small.run(
        model=model,
        mesh=mesh,
        parallel=parallel,
        clip=Unclipped(parallel.norm_across),
        **solver(torch.optim.SGD(grouped(model), lr=0.1), 0.1, small.steps),
    )
    run.batches.mesh, run.batches.passes = mesh, parallel.passes
    return run


def _step(run: Run, update: Update) -> tuple[list[Tensor], float, float]:
    caught: list[Tensor] = []

    def catch(*_: object) -> None:
        gradients = [parameter.grad for parameter in run.learning]
        caught.extend(run.parallel.whole(each).clone() for each in gradients if each is not None)

    handle = run.optimizer.register_step_pre_hook(catch)
    result = train_step(run, update)
    handle.remove()
    return caught, result.grad_norm.item(), read([result.tally], run.mesh)[0]["loss"]


def _whole(run: Run, update: Update, losses: str) -> tuple[list[Tensor], float]:
    batch = run.source.fetch(0, torch.cat([micro.batch.ids for micro in update.microbatches]).numpy())
    logits = run.model(batch["image"])
    loss = 1.3 * nn.functional.cross_entropy(logits, batch["label"])
    if losses == "dice":
        shares, truth = logits.sigmoid(), nn.functional.one_hot(batch["label"], NUM_CLASSES).double()
        loss = loss + 0.7 * (1 - 2 * (shares * truth).sum() / (shares.sum() + truth.sum()))
    return list(torch.autograd.grad(loss, list(run.model.parameters()))), loss.item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
