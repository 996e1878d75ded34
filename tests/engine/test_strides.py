"""Gradients, optimizer state and averages have the strides of their parameter: channels_last changes no number.

The long form, with processes that are killed, is `python -m chaos strides`.
"""

import importlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import ALONE, NUM_CLASSES, Net, Small, grouped, one_thread, solver  # noqa: F401
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.reader import open_checkpoint
from paceline.core.registry import register
from paceline.engine.run import Run
from paceline.engine.step import train_step
from paceline.engine.strategies.deterministic import DeterministicStrategy
from paceline.engine.strategies.single import SingleStrategy
from paceline.models.placement import has_strides_of, make_dense, use_channels_last
from paceline.optim.optimizers import make_optimizer
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate

pytestmark = pytest.mark.usefixtures("one_thread")


class Filters(Net):
    """Weights with several channels and pixels: their strides differ with the layout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, (2, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(18, NUM_CLASSES)
        )


def optimizer_over(model: nn.Module, name: str, lr: float = 0.01) -> Optimizer:
    entry = register.kind("optimizer").find(name)
    assert entry is not None
    names = [each for each, _ in model.named_parameters()]
    groups = [{**group, "param_names": names} for group in grouped(model)]
    return make_optimizer(entry.resolve(), groups, lr, 0.0, dict(entry.arguments()))


def trained(name: str, out: Path, channels_last: bool, kind: type[SingleStrategy]) -> Run:
    """A run of four steps of four micro-batches each."""
    torch.manual_seed(3)
    model = Filters().double()
    if channels_last:
        use_channels_last(model)
    strategy = DeterministicStrategy(model, ALONE) if kind is DeterministicStrategy else SingleStrategy(model)
    optimizer = optimizer_over(model, name)
    small = Small(out, size=48, batch=16, micro_batch_size=4, steps=4)
    run = small.run(model=model, strategy=strategy, **solver(optimizer, 0.01, 4))
    for step_batch in run.batches:
        train_step(run, step_batch)
    return run


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("name", register.kind("optimizer").names())
def test_every_optimizer_trains_the_same_weights_in_either_layout(name: str, tmp_path: Path) -> None:
    plain = trained(name, tmp_path, False, SingleStrategy).model
    for strategy in (SingleStrategy, DeterministicStrategy):
        run = trained(name, tmp_path, True, strategy)
        assert distance(run.model, plain) < 1e-10
        for parameter, state in run.optimizer.state.items():
            values = [each for each in state.values() if isinstance(each, Tensor) and each.shape == parameter.shape]
            assert all(has_strides_of(each, parameter) for each in values)


def test_a_slice_of_a_larger_weight_is_trained_as_a_weight_of_its_own() -> None:
    """As in `conv.weight = nn.Parameter(conv.weight[:, :1])`, for images of one channel."""
    whole = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    images = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    found = []
    for weight in (whole[:, :1], whole[:, :1].contiguous()):
        model = nn.Conv2d(1, 6, 3, bias=False)
        model.weight = nn.Parameter(weight)
        make_dense(model)
        optimizer = optimizer_over(model, "sgd")
        for _ in range(3):
            model(images).square().mean().backward()
            optimizer.step()
        found.append(model.weight.detach())
    assert torch.equal(*found)


RECIPE = {
    "name": "resumed",
    "task": "classification",
    "model": {"name": "convnet", "widths": [3, 4], "dropout": 0.2},
    "data": {"batch_size": 12, "train": {"dataset": "fashion_small", "split": "train"}},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "sgd", "lr": 0.01},
    "train": {"steps": 4, "micro_batch_size": 4, "threads": 1, "channels_last": True},
}
AVERAGES = ["none", "{name: ema, decay: 0.9}", "{name: swa, start: 1, every_steps: 1}"]
GRID = itertools.product(
    ["sgd", "adam", "adamw", "adagrad", "timm/lamb"], ["fp32", "bf16", "fp16", "O2", "O3"], AVERAGES, ["run", "world"]
)


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Any]:
    """Makes runs; torch's settings are put back."""
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))

    def build(words: list[str]) -> Run:
        run = Builder(validate(load(str(tmp_path / "recipe.json"), words)), ALONE).run(tmp_path / "run")
        run.freezing.train_mode(run.model)
        return run

    is_deterministic = torch.are_deterministic_algorithms_enabled()
    yield build
    torch.use_deterministic_algorithms(is_deterministic)


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, dict):
        return [tensor for key in sorted(tree) for tensor in tensors(tree[key])]
    return [tree] if isinstance(tree, Tensor) else []


@pytest.mark.parametrize(
    ("optimizer", "precision", "averaging", "reproducible"), random.Random(1).sample(list(GRID), 20)
)
def test_a_resumed_run_ends_as_a_whole_one(
    optimizer: str, precision: str, averaging: str, reproducible: str, built: Any, tmp_path: Path
) -> None:
    words = [f"optimizer.name={optimizer}", f"train.precision={precision}"]
    words += [f"train.averaging={averaging}", f"train.reproducible={reproducible}"]
    whole = built(words)
    for step_batch in whole.batches:
        train_step(whole, step_batch)
        if step_batch.step == 1:
            saved = whole.store.save(2, whole.state.model_parts(), whole.state.state_dict(), {})
    resumed = built(words)
    resumed.restore(open_checkpoint(saved.path))
    for step_batch in resumed.batches:
        train_step(resumed, step_batch)
    ends = [[*tensors(run.state.model_state_dict()), *tensors(run.state.state_dict())] for run in (whole, resumed)]
    assert len(ends[0]) == len(ends[1]) > 10
    assert all(torch.equal(one, other) and one.stride() == other.stride() for one, other in zip(*ends, strict=True))


def test_killed_and_stopped_processes_end_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    trial = importlib.import_module("chaos.strides")
    cases = [case for case in trial.cases() if case.channels_last and case.procs > 1]
    assert len(trial.cases()) == 2 * len([case for case in trial.cases() if case.channels_last]) >= 40
    case = random.Random(6).choice(cases)
    assert trial.interrupt(case, tmp_path / "case", random.Random(1)) is None, case
