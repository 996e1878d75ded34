"""What a net, a task or a loss draws from `random` and `numpy.random` is as repeatable as dropout."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import ALONE, PlainNet, Small, grouped, one_thread, with_solver  # noqa: F401
from support.forked import WORLD, in_processes
from test_evaluate import bits, with_cores
from torch import Tensor

import paceline
from paceline.core.errors import Stopped
from paceline.core.generators import generator_states
from paceline.core.world import World
from paceline.data.batch import Batch
from paceline.engine.evaluate import evaluate
from paceline.engine.loop import train
from paceline.engine.run import Run
from paceline.engine.strategies.deterministic import DeterministicStrategy
from paceline.losses.classification import CrossEntropy
from paceline.losses.loss_term import LossTerm
from paceline.metrics.classification import TopK

pytestmark = pytest.mark.usefixtures("one_thread")

Draw = Callable[[], float]
DRAWS: dict[str, Draw] = {"random": random.random, "numpy": np.random.rand, "gauss": lambda: random.gauss(1, 1)}


class Noisy(PlainNet):
    """Logits times a number that is drawn."""

    draw: Draw = staticmethod(random.random)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * (1 + self.draw())


class NoisyLoss(CrossEntropy):
    """Cross-entropy that is weighed at random."""

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerm:
        term = super().__call__(outputs, batch)
        return term._replace(numerator=term.numerator * np.random.rand())


@pytest.fixture(params=DRAWS)
def noisy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Noisy]:
    monkeypatch.setattr(Noisy, "draw", staticmethod(DRAWS[request.param]))
    return Noisy


def small(out: Path, **changes: Any) -> Small:
    losses = {"noisy": (NoisyLoss(), 1.0)}
    common = Small(out, size=24, batch=12, micro_batch_size=3, net=Noisy, losses=losses, evaluation_size=20)
    return replace(common, evaluation_batch=4, **changes)


def outcome(run: Run) -> list[Any]:
    return [run.state.metrics, {name: value.tolist() for name, value in run.model.state_dict().items()}]


@pytest.mark.usefixtures("noisy")
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = small(tmp_path / "whole").run()
    train(whole)
    first = small(tmp_path / "cut").run()
    first.stop.requested = True
    with pytest.raises(Stopped):
        train(first)
    random.seed(1)
    np.random.seed(1)
    second = small(tmp_path / "cut").run()
    newest = second.store.newest()
    assert newest is not None
    assert newest.step < 4
    second.restore(newest)
    train(second)
    assert outcome(second) == outcome(whole)


def reproducible(out: Path, world: World) -> list[Any]:
    shared = small(out, world=world.size, rank=world.rank)
    torch.manual_seed(0)
    model = Noisy().double()
    random.seed(world.rank)
    np.random.seed(world.rank)
    run = shared.run(model=model, strategy=DeterministicStrategy(model, world))
    run = with_solver(run, torch.optim.SGD(grouped(model), lr=0.1), 0.1)
    train(run)
    return outcome(run)


@pytest.mark.usefixtures("noisy")
def test_with_world_it_is_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = reproducible(tmp_path / "alone", ALONE)
    assert in_processes(tmp_path / "ranks", lambda world: reproducible(tmp_path / "ranks", world)) == [alone] * WORLD


@pytest.mark.parametrize("only_in", [0, 4])
def test_threads_that_evaluate_do_not_share_draws(
    only_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if a later batch is the first one that draws."""

    def draw_later(self: Noisy, images: Tensor) -> Tensor:
        logits = PlainNet.forward(self, images)
        return logits * (1 + random.random()) if len(images) == 4 and images[0, 0, 0, 0] > threshold else logits

    run = Small(tmp_path, net=Noisy, evaluation_size=120, evaluation_batch=4).run()
    firsts = torch.tensor([run.evaluations["val"].loader.dataset.read(4 * n)["image"][0, 0, 0] for n in range(30)])
    threshold = firsts[:only_in].max().item() if only_in else -1e9
    assert (firsts > threshold).any()
    monkeypatch.setattr(Noisy, "forward", draw_later)
    with_cores(monkeypatch, 1)
    expected = bits(evaluate(run, "val"))
    with_cores(monkeypatch, 3)
    for seed in range(3):
        random.seed(seed)
        assert bits(evaluate(run, "val")) == expected


def test_what_a_metric_draws_when_it_is_computed_does_not_depend_on_what_ran_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Small(tmp_path, evaluation_size=20, evaluation_batch=4).run()
    monkeypatch.setattr(TopK, "compute", lambda self, state: {"top1": random.random() + np.random.rand()})
    found = []
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)
        found.append(evaluate(run, "val").metrics["top1"])
        assert random.random() == random.Random(seed).random(), "the caller's own numbers go on"
    assert found == [found[0]] * 3


def test_numbers_of_the_caller_go_on(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = generator_states()
    run = paceline.build(
        "quickstart", {"train.epochs": None, "train.steps": 2, "schedule.warmup_epochs": 0.01}, out=tmp_path / "run"
    )
    assert generator_states() == before
    paceline.train(run)
    assert generator_states() == before
    paceline.evaluate(run, "val")
    assert generator_states() == before
