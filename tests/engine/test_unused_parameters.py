"""Parameters that no forward pass of a step uses keep their weights, whatever the strategy: no decay, no momentum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ALONE, PlainNet, Small, grouped, one_thread, with_solver  # noqa: F401
from support.forked import WORLD, in_processes
from torch import Tensor, nn

from paceline.core.world import World
from paceline.engine.step import train_step
from paceline.engine.strategies.ddp import DDPStrategy
from paceline.engine.strategies.deterministic import DeterministicStrategy
from paceline.engine.strategies.fsdp import FSDPStrategy
from paceline.engine.strategies.single import SingleStrategy

pytestmark = pytest.mark.usefixtures("one_thread")

STRATEGIES: dict[str, Callable[[nn.Module, World], SingleStrategy]] = {
    "single": lambda model, world: SingleStrategy(model),
    "world": DeterministicStrategy,
    "ddp": lambda model, world: DDPStrategy(model, world, find_unused=True),
    "ddp as it is": DDPStrategy,
    "fsdp": lambda model, world: FSDPStrategy(model, world, []),
}


class Branching(PlainNet):
    """One layer is never used, one only in the micro-batches whose images are bright: those of some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return self.sometimes(logits) if images.sum() > 5 else logits


def weights(folder: Path, strategy: str, world: World) -> dict[str, Any]:
    """The weights after four steps with momentum and weight decay, and the names of what has a momentum."""
    small = Small(folder, size=24, batch=12, micro_batch_size=3, net=Branching, world=world.size, rank=world.rank)
    torch.manual_seed(0)
    model = Branching().double()
    run = small.run(model=model, strategy=STRATEGIES[strategy](model, world))
    run.batches.passes = run.strategy.passes
    run = with_solver(run, torch.optim.SGD(grouped(model), lr=0.1, momentum=0.9, weight_decay=0.1), 0.1)
    for step_batch in run.batches:
        train_step(run, step_batch)
    moved = [name for name, each in model.named_parameters() if run.optimizer.state.get(each)]
    return {"moved": moved, **{name: value.tolist() for name, value in run.state.model_state_dict().items()}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Those of one process."""
    return weights(tmp_path_factory.mktemp("alone"), "single", ALONE)


def test_what_is_never_used_keeps_its_weights(alone: dict[str, Any]) -> None:
    torch.manual_seed(0)
    before = Branching().double().never.weight
    assert alone["never.weight"] == before.tolist()
    assert [name.partition(".")[0] for name in alone["moved"]] == ["layers"] * 4 + ["sometimes"] * 2


@pytest.mark.parametrize("strategy", ["world", "ddp", "fsdp"])
def test_the_same_on_three_processes(strategy: str, alone: dict[str, Any], tmp_path: Path) -> None:
    first, *others = in_processes(tmp_path / "ranks", lambda world: weights(tmp_path, strategy, world))
    assert others == [first] * (WORLD - 1)
    assert first.pop("moved") == alone["moved"]
    for name, value in first.items():
        assert torch.tensor(value).allclose(torch.tensor(alone[name]), rtol=1e-9, atol=0), name
    if strategy == "world":
        own = weights(tmp_path, strategy, ALONE)
        assert {name: own[name] for name in first} == first


def test_ddp_needs_to_be_told(tmp_path: Path) -> None:
    found = in_processes(tmp_path / "ranks", lambda world: weights(tmp_path, "ddp as it is", world))
    assert [code for code, _ in found] == [1] * WORLD
    assert all("never.weight" in message and "find_unused" in message for _, message in found)
