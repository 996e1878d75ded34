"""A step on fake tensors takes the memory of the real one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.core.world import World
from paceline.data.loader import MicroBatch, StepBatch
from paceline.engine.step import train_step
from paceline.engine.strategies import ddp
from paceline.plan.fake_tensors import fake_tensors, limit_of_fake_tensors
from paceline.plan.memory import Memory, MemoryTracker
from paceline.plan.rehearse import rehearse
from paceline.plan.steps import divide
from paceline.recipe.build import Builder
from paceline.recipe.build_data import make_split_loaders
from paceline.recipe.load import load
from paceline.recipe.validate import CheckedRecipe, validate
from paceline.tasks.classification import Classification

SMALL = ["model.widths=[8,16]", "data.batch_size=32", "train.channels_last=false"]
MIB = 2**20


def recipe(*overrides: str, name: str = "quickstart") -> CheckedRecipe:
    return validate(load(name, [*(SMALL if name == "quickstart" else ()), *overrides]))


def measured(checked: CheckedRecipe, size: int, out: Path, number: int = 1) -> Memory:
    """What the second of two real steps takes."""
    tracker = MemoryTracker()
    builder = Builder(checked, World(0, 1, 0, torch.device("cpu")), trains=False)
    loaders = make_split_loaders(builder)  # before: the data set is in memory
    with tracker:
        run = builder.run(out, loaders)
        run.freezing.train_mode(run.model)
        with tracker.watch(run.model, run.optimizer):
            for samples in (2, size):
                held = [
                    MicroBatch(0, index, 0, run.train_loader.fetch(0, np.arange(samples))) for index in range(number)
                ]
                tracker.reset_peak()
                for micro in held:
                    tracker.add(micro.batch.values(), "activations")
                train_step(run, StepBatch(0, number * samples, number, held))
    return tracker.peak


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.precision=O2"],
        ["train.precision=bf16", "train.activation_checkpointing=blocks"],
        ["optimizer=sgd", "train.clip_grad_norm=1"],
        ["optimizer=timm/lamb", "train.averaging=ema"],
    ],
    ids=" ".join,
)
def test_a_rehearsed_step_takes_what_the_real_one_takes(overrides: list[str], tmp_path: Path) -> None:
    checked = recipe(*overrides)
    with rehearse(checked) as rehearsal:
        planned = rehearsal.step(32)
    real = measured(checked, 32, tmp_path)
    assert planned.total == pytest.approx(real.total, rel=0.02)
    assert planned.parts["optimizer"] == real.parts["optimizer"]


def test_accumulated_gradients_stay_through_later_micro_batches(tmp_path: Path) -> None:
    checked = recipe("model.widths=[64,128]")
    with rehearse(checked) as rehearsal:
        one, two, more = (rehearsal.step(4, number) for number in (1, 2, 5))
    assert one.total < two.total == more.total
    assert two.total == pytest.approx(measured(checked, 4, tmp_path, 2).total, rel=0.02)


def test_an_average_is_among_the_parameters_from_its_start() -> None:
    parts = []
    for name in ("none", "ema", "swa"):
        with rehearse(recipe(f"train.averaging={name}")) as rehearsal:
            parts.append(rehearsal.step(32).parts)
            size = sum(each.nbytes for each in rehearsal.run.model.parameters())
    assert parts[1]["parameters"] == parts[2]["parameters"] == parts[0]["parameters"] + size
    assert parts[1]["activations"] == parts[2]["activations"] == parts[0]["activations"]


def shares(strategy: str, processes: int) -> Memory:
    with rehearse(recipe("model.widths=[64,128]", f"train.strategy={strategy}"), processes) as rehearsal:
        return rehearsal.step(2)


def test_every_process_of_ddp_holds_all_and_of_fsdp_its_part() -> None:
    alone, ddp, fsdp = shares("single", 1), shares("ddp", 2), shares("fsdp", 2)
    gradients = alone.parts["parameters"]
    assert ddp.parts["parameters"] == alone.parts["parameters"]
    assert ddp.parts["optimizer"] == alone.parts["optimizer"]
    assert ddp.parts["gradients"] == pytest.approx(gradients, rel=0.01)  # buckets, from the start of a step to its end
    for part in ("parameters", "optimizer"):
        assert fsdp.parts[part] == pytest.approx(alone.parts[part] / 2, rel=0.05)
    assert fsdp.parts["communication"] > 0


def test_more_processes_than_are_rehearsed_divide_what_is_cut_into_parts() -> None:
    with rehearse(recipe("model.widths=[64,128]", "train.strategy=fsdp"), 8) as rehearsal:
        eight = rehearsal.step(2)
        many = divide(eight, rehearsal.run, 64)
    assert many.parts["optimizer"] == pytest.approx(eight.parts["optimizer"] / 8, rel=0.1)
    assert many.parts["activations"] == eight.parts["activations"]
    assert many.total == pytest.approx(shares("fsdp", 64).total, rel=0.05)


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_nothing_is_left_of_a_rehearsal(strategy: str) -> None:
    apply, parallel = nn.Module._apply, vars(ddp)["DistributedDataParallel"]
    with rehearse(recipe(f"train.strategy={strategy}")):
        pass
    assert nn.Module._apply is apply
    assert vars(ddp)["DistributedDataParallel"] is parallel
    assert type(torch.zeros(1)) is torch.Tensor
    assert not torch.distributed.is_initialized()


def test_weights_that_are_sampled_until_they_fit_are_left_as_they_are() -> None:
    with fake_tensors():
        assert nn.init.trunc_normal_(torch.empty(3, 4), std=0.02).shape == (3, 4)


def test_a_task_of_a_user_asks_for_its_data(own_names: None) -> None:
    register.task("own_task")(type("OwnTask", (Classification,), {}))
    with pytest.raises(DataError, match="own_task"), rehearse(recipe("task=own_task", name="image_folder")):
        pass


def test_masks_select_all_and_questions_for_mistakes_find_none() -> None:
    with fake_tensors():
        boxes, mask = torch.zeros(6, 4), torch.zeros(6, dtype=torch.bool)
        assert boxes[mask].shape == (6, 4)
        assert boxes[mask.nonzero().flatten()].shape == (6, 4)
        boxes[mask] = 1.0
        assert not (boxes < 0).any()
        assert (boxes >= 0).all()


def test_values_that_fake_tensors_do_not_have_are_assumed() -> None:
    with fake_tensors():
        ids = torch.zeros(4, dtype=torch.int64)
        assert torch.bincount(ids, minlength=11).shape == (11,)
        assert torch.bincount(ids).dtype == torch.int64
        assert torch.bincount(ids, torch.rand(4)).dtype == torch.float32
        assert torch.bincount(ids, torch.rand(4, dtype=torch.float64), 3).dtype == torch.float64
        assert len(ids.nonzero()) == 4


def test_an_optimizer_that_divides_by_what_it_has_counted_is_a_limit_of_fake_tensors() -> None:
    with pytest.raises(ZeroDivisionError) as caught, rehearse(recipe("optimizer=nadam", "model.widths=[4]")):
        pass
    assert "depends on values" in str(limit_of_fake_tensors(caught.value))
