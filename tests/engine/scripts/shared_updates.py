"""One of several processes: takes the same steps with every strategy and compares each with the whole batch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from small_runs import ALONE, NUM_CLASSES, PlainNet, Remembering, Small, SoftDice, grouped, solver

from paceline.core.world import World, join
from paceline.data.loader import StepBatch
from paceline.engine.loss_accumulator import read
from paceline.engine.run import Run
from paceline.engine.step import train_step
from paceline.engine.strategies.ddp import DDPStrategy
from paceline.engine.strategies.deterministic import DeterministicStrategy
from paceline.engine.strategies.fsdp import FSDPStrategy
from paceline.engine.strategies.single import SingleStrategy
from paceline.losses.classification import CrossEntropy
from paceline.models.norm import convert_sync_batchnorm
from paceline.optim.clipping import NoClip

Strategy = Callable[[nn.Module, World], SingleStrategy]
STRATEGIES: dict[str, Strategy] = {
    "ddp": DDPStrategy,
    "ddp, static graph": lambda model, world: DDPStrategy(model, world, static_graph=True),
    "ddp, unused parameters looked for": lambda model, world: DDPStrategy(model, world, find_unused=True),
    "ddp, tiny buckets": lambda model, world: DDPStrategy(model, world, bucket_mb=0.0001),
    "fsdp": lambda model, world: FSDPStrategy(model, world, [[model.get_submodule("layers.0")]]),
    "zero": lambda model, world: FSDPStrategy(model, world, [], keeps_parameters=True),
    "deterministic": DeterministicStrategy,
}
# Samples in the data set and micro-batch: one a process, several, unequal numbers, and a step that is too small.
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
    world = join("cpu")
    found: dict[str, Any] = {"ids": [], "cases": {}, "remembered": {}}
    for strategy, make in STRATEGIES.items():
        for cut, (size, micro_batch_size) in CUTS.items():
            for losses in ("cross entropy", "dice"):
                found["cases"][f"{strategy}, {cut}, {losses}"] = _compare(world, make, size, micro_batch_size, losses)
        found["remembered"][strategy] = _remembered(world, make)
    found["remembered"]["deterministic, alone"] = _remembered(ALONE, DeterministicStrategy)
    found["cases"]["sync_bn"] = _compare_statistics(world)
    small = Small(out, size=50, batch=17, micro_batch_size=4, steps=6, world=world.size, rank=world.rank)
    found["ids"] = [
        [int(i) for micro in step_batch.micro_batches for i in micro.batch.ids] for step_batch in small.run().batches
    ]
    (out / f"rank-{world.rank}.json").write_text(json.dumps(found))
    world.barrier()
    os._exit(0)


def _compare(world: World, make: Strategy, size: int, micro_batch_size: int, losses: str) -> float:
    """The greatest difference of gradients, norms and losses from the whole batch's over two steps."""
    chosen = {"dice": (SoftDice(), 0.7)} if losses == "dice" else {}
    small = Small(
        Path(),
        size,
        micro_batch_size=micro_batch_size,
        losses={**chosen, "cross_entropy": (CrossEntropy(), 1.3)},
        steps=2,
    )
    run, oracle = _shared(small, world, make), small.run()
    worst = 0.0
    for step_batch, whole in zip(run.batches, oracle.batches, strict=True):
        expected, expected_loss = _whole(oracle, whole, losses)
        gradients, norm, loss = _step(run, step_batch)
        differences = [(one - other).abs().max().item() for one, other in zip(gradients, expected, strict=True)]
        total = torch.cat([each.reshape(-1) for each in expected]).norm().item()
        worst = max(worst, *differences, abs(norm - total), abs(loss - expected_loss))
        oracle.progress.step += 1
        with torch.no_grad():
            for parameter, gradient in zip(oracle.model.parameters(), expected, strict=True):
                parameter.sub_(0.1 * gradient)
    weights = zip(run.model.parameters(), oracle.model.parameters(), strict=True)
    return max(worst, *((run.strategy.whole(one) - other).abs().max().item() for one, other in weights))


def _remembered(world: World, make: Strategy) -> dict[str, Any]:
    """What a loss remembers of three steps, and the samples of this process and of first micro-batches."""
    loss = Remembering(50)
    small = Small(Path(), 50, batch=17, micro_batch_size=4, steps=3, losses={"remembering": (loss, 1.0)})
    run = _shared(small, world, make, {"loss remembering": loss})
    own, first = [], []
    for step_batch in run.batches:
        real = [micro for micro in step_batch.micro_batches if not micro.is_padding]
        own += [int(sample) for micro in real for sample in micro.batch.ids]
        first += [int(sample) for micro in real if micro.index == 0 for sample in micro.batch.ids]
        train_step(run, step_batch)
    return {"heat": float(loss.heat).hex(), "seen": loss.seen.tolist(), "own": own, "first": first}


def _compare_statistics(world: World) -> float:
    """The same for BatchNorm over all processes: statistics, too, are those of the whole batch."""
    small = Small(Path(), 64, micro_batch_size=-(-64 // world.size), net=BatchNormed, steps=2)
    torch.manual_seed(0)
    model = BatchNormed().double()
    convert_sync_batchnorm(model)
    run = _around(small, world, model, DDPStrategy)
    alone = small.run()
    for step_batch, whole in zip(run.batches, alone.batches, strict=True):
        train_step(run, step_batch)
        batch = alone.train_loader.fetch(0, torch.cat([micro.batch.ids for micro in whole.micro_batches]).numpy())
        loss = nn.functional.cross_entropy(alone.model(batch["image"]), batch["label"])
        gradients = torch.autograd.grad(loss, list(alone.model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(alone.model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        alone.progress.step += 1
    pairs = zip(model.state_dict().values(), alone.model.state_dict().values(), strict=True)
    return float(max((one.double() - other.double()).abs().max().item() for one, other in pairs))


def _shared(small: Small, world: World, make: Strategy, parts: Mapping[str, Any] | None = None) -> Run:
    torch.manual_seed(0)
    return _around(small, world, PlainNet().double(), make, parts)


def _around(
    small: Small, world: World, model: nn.Module, make: Strategy, parts: Mapping[str, Any] | None = None
) -> Run:
    strategy = make(model, world)
    run = small.run(
        model=model,
        world=world,
        strategy=strategy,
        clip_gradients=NoClip(strategy.norm_across),
        parts=parts or {},
        **solver(torch.optim.SGD(grouped(model), lr=0.1), 0.1, small.steps),
    )
    run.batches.world, run.batches.passes = world, strategy.passes
    return run


def _step(run: Run, step_batch: StepBatch) -> tuple[list[Tensor], float, float]:
    caught: list[Tensor] = []

    def catch(*_: object) -> None:
        gradients = [parameter.grad for parameter in run.optimized]
        caught.extend(run.strategy.whole(each).clone() for each in gradients if each is not None)

    handle = run.optimizer.register_step_pre_hook(catch)
    result = train_step(run, step_batch)
    handle.remove()
    return caught, float(result.grad_norm), read([result.accumulator], run.world)["loss"][0]


def _whole(run: Run, step_batch: StepBatch, losses: str) -> tuple[list[Tensor], float]:
    batch = run.train_loader.fetch(0, torch.cat([micro.batch.ids for micro in step_batch.micro_batches]).numpy())
    logits = run.model(batch["image"])
    loss = 1.3 * nn.functional.cross_entropy(logits, batch["label"])
    if losses == "dice":
        shares, truth = logits.sigmoid(), nn.functional.one_hot(batch["label"], NUM_CLASSES).double()
        loss = loss + 0.7 * (1 - 2 * (shares * truth).sum() / (shares.sum() + truth.sum()))
    return list(torch.autograd.grad(loss, list(run.model.parameters()))), loss.item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
