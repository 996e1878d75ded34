"""`train.channels_last: auto` follows a rule, is recorded, and is then the same as if the recipe had said so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import WORLD, in_processes
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.checkpoint.reader import open_checkpoint
from paceline.core.world import World
from paceline.engine import step
from paceline.engine.run import Run
from paceline.engine.step import train_step
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate

ALONE = World(0, 1, 0, torch.device("cpu"))
RECIPE: dict[str, Any] = {
    "name": "layout",
    "task": "classification",
    "model": {"name": "convnet", "widths": [3, 8]},
    "data": {"batch_size": 256, "train": {"dataset": "fashion_small", "split": "train"}},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "adagrad", "lr": 0.01},
    "train": {"steps": 4, "threads": 1},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
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


def has_layout(run: Run) -> bool:
    weights = [each.weight for each in run.model.modules() if isinstance(each, nn.Conv2d) and each.weight.shape[1] > 1]
    assert weights
    return all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


@pytest.mark.parametrize("auto", [True, False])
def test_a_chosen_layout_is_the_same_as_a_written_one_and_survives_a_restart(
    auto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts choose alike; a resumed run follows its checkpoint, whatever the rule says since."""
    words = [] if auto else ["model.widths=[7]"]
    first = trained(built(*words), 2)
    assert (first.state.choices.channels_last, has_layout(first)) == (auto, auto)
    saved = first.store.save(2, first.state.model_parts(), first.state.state_dict(), {})
    monkeypatch.setattr(step, "_MIN_CHANNELS", 1 if not auto else 1000)
    resumed = built(*words)
    resumed.restore(open_checkpoint(saved.path))
    assert resumed.state.choices.channels_last is auto
    written = trained(built(*words, f"train.channels_last={str(auto).lower()}"), 4)
    assert_same(trained(resumed, 4), written)
    assert_same(trained(first, 4), written)
    evaluated = built(*words)  # as `paceline eval` does
    evaluated.state.load_model(open_checkpoint(saved.path))
    assert has_layout(evaluated) is auto


@pytest.mark.parametrize(
    "words", [["data.batch_size=32"], ["train.strategy=fsdp"], ["train.compile=true"]], ids=" ".join
)
def test_what_is_not_worth_it_or_was_not_measured_stays_contiguous(words: list[str]) -> None:
    run = built(*words)
    step.choose_channels_last(run, next(iter(run.batches)))
    assert run.state.choices.channels_last is False


def net(*layers: tuple[int, int, int]) -> nn.Module:
    """Convolutions: channels in and out, and the width of the kernel."""
    return nn.Sequential(*(nn.Conv2d(*layer) for layer in layers))


@pytest.mark.parametrize(
    ("model", "images", "faster"),
    [
        (net((3, 8, 3)), torch.empty(4, 3, 64, 64), True),
        (net((3, 8, 3)), list(torch.empty(4, 3, 64, 64)), True),  # a detector's list
        (net((3, 8, 3)), torch.empty(1, 3, 64, 64), False),
        (net((3, 4, 3)), torch.empty(4, 3, 64, 64), False),
        (net((3, 512, 3), (512, 512, 3)), torch.empty(4, 3, 64, 64), True),
        (net((3, 512, 3), (512, 512, 3)), torch.empty(3, 3, 64, 64), False),  # large kernels over few pixels
        (net((3, 512, 3), (512, 9999, 1)), torch.empty(3, 3, 64, 64), True),
        (nn.Sequential(nn.Linear(3, 8)), torch.empty(4, 3, 64, 64), False),
        (net((3, 8, 3)), torch.empty(4, 8, 3, 64, 64), False),  # video
    ],
)
def test_the_rule_looks_at_layers_and_image_sizes(model: nn.Module, images: Any, faster: bool) -> None:
    assert step.is_channels_last_faster(model, images) is faster


def test_the_rule_changes_no_buffer_of_a_parametrized_layer() -> None:
    model = nn.Sequential(spectral_norm(nn.Conv2d(3, 8, 3))).train()
    before = [buffer.clone() for buffer in model.buffers()]
    assert before
    assert step.is_channels_last_faster(model, torch.empty(4, 3, 64, 64))
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), before, strict=True))


def test_the_first_process_decides_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of other ranks may have other sizes."""

    def work(world: World) -> Any:
        monkeypatch.setattr(step, "_MIN_VALUES", 1 if world.is_main else 1 << 40)
        run = trained(built("train.micro_batch_size=64", world=world), 1)
        return [run.state.choices.channels_last, has_layout(run)]

    assert in_processes(tmp_path / "ranks", work) == [[True, True]] * WORLD
