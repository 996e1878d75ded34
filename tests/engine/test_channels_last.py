"""`train.channels_last: auto` is tried once, recorded, and then the same as if the recipe had said so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import WORLD, in_processes
from torch import Tensor, nn

from paceline.core.world import World
from paceline.engine import channels_last
from paceline.engine.forward import discarded_pass
from paceline.engine.run import Run
from paceline.engine.step import train_step
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate

ALONE = World(0, 1, 0, torch.device("cpu"))
RECIPE: dict[str, Any] = {
    "name": "layout",
    "task": "classification",
    "model": {"name": "convnet", "widths": [3, 4]},
    "data": {"batch_size": 256, "train": {"dataset": "fashion_small", "split": "train"}},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "adagrad", "lr": 0.01},
    "train": {"steps": 100, "threads": 1},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    yield tmp_path
    torch.use_deterministic_algorithms(is_deterministic)
    ALONE.leave()  # the group of one that fsdp makes


def built(*words: str, world: World = ALONE) -> Run:
    run = Builder(validate(load("recipe.json", words)), world).run(Path("run"))
    run.freezing.train_mode(run.model)
    return run


def trained(run: Run, steps: int) -> Run:
    for step_batch in run.batches:
        train_step(run, step_batch)
        if run.progress.step == steps:
            break
    return run


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, dict):
        return [tensor for key in sorted(tree) for tensor in tensors(tree[key])]
    return [tree] if isinstance(tree, Tensor) else []


def end(run: Run) -> list[Tensor]:
    return [*tensors(run.state.model_state_dict()), *tensors(run.state.state_dict())]


def assert_same(one: Run, other: Run) -> None:
    pairs = list(zip(end(one), end(other), strict=True))
    assert len(pairs) > 10
    assert all(torch.equal(*pair) and pair[0].stride() == pair[1].stride() for pair in pairs)


def measured(monkeypatch: pytest.MonkeyPatch, share: float) -> list[float]:
    """Have channels_last take that share of the time of the other layout; how often that was asked for."""
    asked: list[float] = []

    def measure(*_: object) -> float:
        asked.append(share)
        return share

    monkeypatch.setattr(channels_last, "_measure", measure)
    return asked


def has_layout(run: Run) -> bool:
    weights = [each.weight for each in run.model.modules() if isinstance(each, nn.Conv2d) and each.weight.shape[1] > 1]
    assert weights
    return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_a_measured_choice_is_the_same_as_a_written_one_and_survives_a_restart(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measured(monkeypatch, share)
    first = trained(built(), 2)
    assert (len(asked), first.state.choices.channels_last, has_layout(first)) == (1, share < 1, share < 1)
    saved = first.store.save(2, first.state.model_parts(), first.state.state_dict(), {})
    measured(monkeypatch, 2 - share)  # another machine, say, where it is the other way round
    resumed = built()
    resumed.restore(resumed.store.open(saved.path))
    assert resumed.state.choices.channels_last is (share < 1)
    written = trained(built(f"train.channels_last={str(share < 1).lower()}"), 4)
    assert_same(trained(resumed, 4), written)
    assert_same(trained(first, 4), written)
    evaluated = built()  # as `paceline eval` does
    evaluated.state.load_model(evaluated.store.open(saved.path))
    assert has_layout(evaluated) is (share < 1)


def test_the_same_command_chooses_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured(monkeypatch, 0.5)
    assert trained(built(), 1).state.choices.channels_last is True
    again = measured(monkeypatch, 1.5)
    assert trained(built(), 1).state.choices.channels_last is True
    assert trained(built("train.reproducible=world", "train.micro_batch_size=256"), 1).state.choices.channels_last
    assert (len(asked), len(again)) == (1, 0)
    assert trained(built("train.threads=2"), 1).state.choices.channels_last is False
    assert len(again) == 1


@pytest.mark.parametrize(
    "words",
    [["train.steps=99"], ["data.batch_size=64"], ["train.strategy=fsdp"], ["train.channels_last=false"]],
    ids=" ".join,
)
def test_what_is_not_worth_it_is_not_tried(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured(monkeypatch, 0.5)
    assert trained(built(*words), 1).state.choices.channels_last is False
    assert asked == []


def test_trying_leaves_no_trace() -> None:
    """The real trial, whatever it chooses: weights and buffers begin as if there had been none."""
    run, before = built(), end(built())
    step_batch = next(iter(run.batches))
    assert channels_last._measure(run, lambda: discarded_pass(run, step_batch.micro_batches[-1])) > 0
    assert all(torch.equal(one, other) for one, other in zip(end(run), before, strict=True))
    assert all(parameter.grad is None and parameter.is_contiguous() for parameter in run.model.parameters())
    assert_same(trained(run, 1), trained(built("train.channels_last=" + str(has_layout(run)).lower()), 1))


def test_the_first_process_decides_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "_measure", lambda run, _: 0.5 + run.world.rank)

    def work(world: World) -> Any:
        run = trained(built("train.micro_batch_size=64", world=world), 1)
        return [run.state.choices.channels_last, has_layout(run)]

    monkeypatch.setattr(channels_last, "_LEAST_VALUES", 1)
    assert in_processes(tmp_path / "ranks", work) == [[True, True]] * WORLD
