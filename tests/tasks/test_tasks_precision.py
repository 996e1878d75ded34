"""Every precision and every way of activation checkpointing trains each vision task; the latter change no bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.sample_recipes import TASKS, settings_kept, write_sample
from torch import Tensor

from paceline.engine.evaluate import evaluate
from paceline.engine.step import train_step
from paceline.plan.memory import MemoryTracker
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate

STEPS = 2
FLOAT32 = ["fp32", "tf32", "O0"]
SCALED = ["fp16", "O1", "O2"]  # with a scale that nothing overflows with, so that no update is left out
CHECKPOINTING = ["{name: blocks}", "{name: blocks, every: 2}"]
# In float16 a CPU is slow: each image and each clip is looked at once.
ONE_VIEW: dict[str, list[str]] = {
    "detection": [],
    "instance_segmentation": [],
    "keypoints": ["task.flip=false"],
    "masked_autoencoder": [],
    "saliency": [],
    "segmentation": ["task=segmentation"],
    "transformers": [],
    "video": ["data.val.transforms.0.num_clips=1", "data.val.transforms.1.num_crops=1"],
}


@dataclass
class Trained:
    """What some steps did."""

    losses: list[dict[str, float]]
    skipped: list[bool]
    metrics: dict[str, float]
    weights: dict[str, Tensor]
    checkpointed_blocks: list[str]

    def differing(self, other: Trained) -> list[str]:
        """Names of parameters and buffers whose bits are not the other's."""
        assert self.weights.keys() == other.weights.keys()
        return [name for name, value in self.weights.items() if not torch.equal(value, other.weights[name])]


def trained(recipe: Path, out: Path, *overrides: str, measures: bool = True) -> Trained:
    """A few steps of a run as commands build it, and perhaps what it is measured to be afterwards."""
    small = ["data.batch_size=3", f"train.steps={STEPS}", "evaluate.save_predictions=false"]
    builder = Builder(validate(load(str(recipe), [*small, *overrides])))
    run = builder.run(out)
    run.freezing.train_mode(run.model)
    results = [train_step(run, update) for update in run.batches]
    losses = [{name: float(value) for name, value in result.losses.items()} for result in results]
    metrics = evaluate(run, "val").metrics if measures else {}
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    return Trained(losses, [result.skipped for result in results], metrics, weights, builder.checkpointed_blocks)


def overrides_of(kind: str, precision: str) -> list[str]:
    scale = ["train.loss_scale=128"] if precision in SCALED else []
    return [f"train.precision={precision}", *scale, *ONE_VIEW[kind]]


@pytest.fixture(autouse=True, scope="module")
def _settings() -> Iterator[None]:
    with settings_kept():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipe of each task is, `KIND.json`."""
    made = tmp_path_factory.mktemp("precision")
    for kind in TASKS:
        write_sample(kind, made)
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Trained]:
    """Each task in float32, without activation checkpointing."""
    return {kind: trained(folder / f"{kind}.json", folder / "plain", *overrides_of(kind, "fp32")) for kind in TASKS}


def is_finite(found: Trained) -> bool:
    numbers = [value for losses in [*found.losses, found.metrics] for value in losses.values()]
    return all(map(math.isfinite, numbers)) and all(bool(value.isfinite().all()) for value in found.weights.values())


PRECISIONS = [*FLOAT32, "bf16", *SCALED, "O3"]
# With weights in float16 and this loss scale, gradients of D-FINE overflow.
CASES = [(kind, each) for kind in TASKS for each in PRECISIONS if (kind, each) != ("transformers", "O2")]


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_every_precision_trains_every_task(
    kind: str, precision: str, folder: Path, plain: dict[str, Trained], tmp_path: Path
) -> None:
    expected = plain[kind]
    found = trained(folder / f"{kind}.json", tmp_path, *overrides_of(kind, precision))
    assert is_finite(found)
    assert found.skipped == [False] * STEPS
    assert found.metrics.keys() == expected.metrics.keys()
    # Before the first step weights are the same; what differs is rounding, and which proposals or queries it selects.
    share = 0.2 if kind == "transformers" else None
    assert found.losses[0] == pytest.approx(
        expected.losses[0], rel=share, abs=0.2 if kind == "instance_segmentation" else 0.05
    )
    has_changed = found.differing(expected) != []
    assert has_changed == (precision not in FLOAT32)  # there is no TF32 on a CPU
    parameters = {value.dtype for name, value in found.weights.items() if name.endswith("weight")}
    halves = {"O2": {torch.float16, torch.float32}, "O3": {torch.float16}}
    assert parameters == halves.get(precision, {torch.float32})


@pytest.mark.parametrize("kind", ["saliency", "segmentation"])
def test_half_precision_takes_less_memory_for_activations(kind: str, folder: Path, tmp_path: Path) -> None:
    peaks = {each: activation_bytes(folder / f"{kind}.json", tmp_path, each) for each in ("fp32", "bf16", "fp16")}
    assert peaks["bf16"] < 0.9 * peaks["fp32"]
    assert peaks["fp16"] == pytest.approx(peaks["bf16"], rel=0.02)


def activation_bytes(recipe: Path, out: Path, precision: str) -> int:
    """The peak of live tensors in a step, without weights, gradients and optimizer state."""
    changes = ["data.batch_size=3", "train.steps=2", f"train.precision={precision}"]
    run = Builder(validate(load(str(recipe), changes))).run(out)
    batches = iter(run.batches)
    train_step(run, next(batches))
    tracker, batch = MemoryTracker(), next(batches)
    with tracker, tracker.watch(run.model, run.optimizer):
        train_step(run, batch)
    return tracker.peak_passing


@pytest.mark.parametrize("how", CHECKPOINTING)
@pytest.mark.parametrize("kind", TASKS)
def test_activations_that_are_computed_again_change_no_bit(
    kind: str, how: str, folder: Path, plain: dict[str, Trained], tmp_path: Path
) -> None:
    words = [*overrides_of(kind, "fp32"), f"train.activation_checkpointing={how}"]
    found = trained(folder / f"{kind}.json", tmp_path, *words, measures=False)
    assert found.checkpointed_blocks
    assert is_finite(found)
    assert found.losses == plain[kind].losses
    assert found.differing(plain[kind]) == []


@pytest.mark.parametrize("kind", TASKS)
def test_they_change_none_in_lower_precision_either(kind: str, folder: Path, tmp_path: Path) -> None:
    pair = []
    for how in ("none", "blocks"):
        words = [*overrides_of(kind, "bf16"), f"train.activation_checkpointing={how}"]
        pair.append(trained(folder / f"{kind}.json", tmp_path / how, *words, measures=False))
    assert pair[1].checkpointed_blocks
    assert pair[1].losses == pair[0].losses
    assert pair[1].differing(pair[0]) == []


def test_minet_computed_again_trains_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    words = ["model=minet_light", "train.steps=1", "data.batch_size=2"]
    pair = []
    for how in ("none", "blocks"):
        out = tmp_path / how
        pair.append(
            trained(folder / "saliency.json", out, *words, f"train.activation_checkpointing={how}", measures=False)
        )
    assert pair[1].checkpointed_blocks
    assert is_finite(pair[0])
    assert pair[1].losses == pair[0].losses
    assert pair[1].differing(pair[0]) == []
