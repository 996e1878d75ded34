"""Rows of a plan: settings, the largest micro-batch, rehearsals that rows share, rows side by side."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.core import user_code
from paceline.plan import grid as grid_module
from paceline.plan import rehearse as rehearse_module
from paceline.plan import steps as steps_module
from paceline.plan.grid import Grid, combinations, plan_rows, split_choices
from paceline.plan.rehearse import rehearse
from paceline.plan.rows import Refused, Row
from paceline.plan.steps import Growth, largest_micro_batch
from paceline.recipe.load import load
from paceline.recipe.validate import validate

SMALL = ["model.widths=[8,16]", "data.batch_size=32", "train.channels_last=false", "evaluate.batch_size=1"]


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of processes of each rehearsal, in one process."""
    made: list[int] = []

    def counted(checked: Any, processes: int, *rest: Any) -> Any:
        made.append(processes)
        return rehearse(checked, processes, *rest)

    monkeypatch.setattr(grid_module, "rehearse", counted)
    monkeypatch.setattr(grid_module, "num_cores", lambda: 1)
    return made


def planned(*settings: dict[str, str], fixed: list[str] = SMALL, limit: int | None = None) -> list[Row]:
    rows = plan_rows(Grid("quickstart", fixed, limit), settings)
    assert all(isinstance(row, Row) for row in rows)
    return [row for row in rows if isinstance(row, Row)]


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    with rehearse(validate(load("quickstart", SMALL))) as rehearsal:

        def total(size: int) -> int:
            return rehearsal.step(size).total

        known = total(32)
        for limit in (known // 3, 3 * known + 12_345):
            found = largest_micro_batch(total, 32, limit)
            assert total(found) <= limit < total(found + 1)
        assert largest_micro_batch(total, 32, 1_000) == 0
        assert largest_micro_batch(total, 32, 100 * known, most=50) == 50


@pytest.mark.parametrize(
    ("overrides", "processes"),
    [
        (["train.precision=bf16", "train.activation_checkpointing=blocks", "optimizer=sgd"], 1),
        (["train.strategy=fsdp"], 8),
        (["train.strategy=zero", "train.averaging=ema"], 2),
    ],
)
def test_memory_of_any_size_is_that_of_a_step(overrides: list[str], processes: int) -> None:
    """By two steps, also where another moment of the step becomes its peak."""
    with rehearse(validate(load("quickstart", [*SMALL, "model.widths=[64,128]", *overrides])), processes) as rehearsal:
        for number in (1, 2):
            rehearsal.step(2, number)
            two = rehearsal.timeline
            rehearsal.step(5, number)
            growth = Growth(2, two, 5, rehearsal.timeline)
            sizes = (3, 64, 1_000)
            expected = [rehearsal.step(size, number) for size in sizes]
            assert [growth.memory(size).total for size in sizes] == [each.total for each in expected]
            assert growth.memory(64) == expected[1]


def test_the_largest_micro_batch_is_found_where_memory_grows_faster_in_large_ones() -> None:
    found = largest_micro_batch(lambda size: 700 + max(33 * size, 68 * size - 900), 2, 40_000)
    assert found == (40_000 - 700 + 900) // 68


def test_the_largest_micro_batch_of_a_row_is_the_last_that_fits() -> None:
    (one,) = planned({"procs": "1"})
    limit = 5 * one.memory.total + 321
    (row,) = planned({"procs": "1"}, limit=limit)
    with rehearse(validate(load("quickstart", SMALL))) as rehearsal:
        assert row.largest_micro_batch is not None
        assert (
            rehearsal.step(row.largest_micro_batch).total <= limit < rehearsal.step(row.largest_micro_batch + 1).total
        )


def test_the_largest_micro_batch_of_a_model_that_goes_through_its_images_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its steps have other moments for every size, so its memory grows by the peaks of two of them."""
    small = ["data.batch_size=2", "model.width=16", "data.train.transforms.0.size=[64,64]"]
    small += ["evaluate.batch_size=1"]
    grid, settings = Grid("bccd", small), {"procs": "1"}
    with rehearse(grid.check(settings), 1, grid.shape) as rehearsal:
        limit = rehearsal.step(9).total
    monkeypatch.setattr(steps_module, "_MANY", 3)
    (row,) = plan_rows(replace(grid, limit=limit), [settings])
    assert isinstance(row, Row)
    assert row.largest_micro_batch == 9


def test_rows_that_divide_a_step_differently_share_one_rehearsal(rehearsals: list[int]) -> None:
    choices = {"procs": ["1", "2", "4", "16"], "train.micro_batch_size": ["4", "1"]}
    rows = planned(*combinations(choices))
    assert rehearsals == [1, 2]  # alone, and with ddp, where every process holds everything
    assert [row.micro_batch_size for row in rows] == [4, 1, 4, 1, 4, 1, 2, 1]
    assert [row.num_micro_batches for row in rows] == [8, 32, 4, 16, 2, 8, 1, 2]


def test_shared_rehearsals_give_what_single_ones_give() -> None:
    settings = [{"procs": procs, "train.micro_batch_size": "4"} for procs in ("2", "4")]
    together = planned(*settings)
    for row, each in zip(together, settings, strict=True):
        with rehearse(validate(load("quickstart", [*SMALL, "train.micro_batch_size=4"])), int(each["procs"])) as alone:
            assert row.step.memory == alone.step(row.micro_batch_size, row.num_micro_batches)


def test_thousands_of_processes_are_arithmetic(rehearsals: list[int]) -> None:
    settings = [{"procs": procs, "train.strategy": "fsdp"} for procs in ("8", "64", "4096")]
    eight, many, most = planned(*settings, fixed=[*SMALL, "model.widths=[64,128]", "data.batch_size=8192"])
    assert rehearsals == [8]
    assert eight.memory.parts["optimizer"] > many.memory.parts["optimizer"] > most.memory.parts["optimizer"]


def test_rows_side_by_side_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = list(combinations({"procs": ["1"], "train.precision": ["fp32", "bf16", "fp8"]}))
    done: list[int] = []
    monkeypatch.setattr(grid_module, "num_cores", lambda: 2)
    apart = plan_rows(Grid("quickstart", SMALL, 2**20), settings, done.append)
    monkeypatch.setattr(grid_module, "num_cores", lambda: 1)
    assert apart == plan_rows(Grid("quickstart", SMALL, 2**20), settings)
    assert sum(done) == 2
    refused = apart[2]
    assert isinstance(refused, Refused)
    assert "train.precision" in refused.reason


def test_data_that_is_not_here_is_assumed() -> None:
    """MINet on ResNet-50: its parameters as published, and the images of the recipe's own size."""
    (row,) = plan_rows(Grid("minet_resnet50"), [{"procs": "1"}])
    assert isinstance(row, Row)
    assert "DUTS" in row.missing
    assert row.micro_batch_size == 4
    assert row.num_steps is None
    assert row.memory.parts["parameters"] >= 160 * 10**6 * 4


def test_a_combination_that_cannot_be_is_refused_with_its_reason() -> None:
    (row,) = plan_rows(Grid("quickstart", SMALL), [{"procs": "2", "train.strategy": "single"}])
    assert isinstance(row, Refused)
    assert "train.strategy" in row.reason


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("maskrcnn_resnet50_fpn", ["learns from masks", "task: instance_segmentation"]),
        ("keypointrcnn_resnet50_fpn", ["keypoints"]),
    ],
)
def test_detectors_of_other_tasks_are_refused(name: str, expected: list[str]) -> None:
    changes = [f"model={{name: torchvision/detection/{name}}}", "data.batch_size=2"]
    (row,) = plan_rows(Grid("ssd300_pet", changes), [{"procs": "1"}])
    assert isinstance(row, Refused)
    assert all(text in row.reason for text in expected)


def test_processes_on_a_cpu_share_its_memory() -> None:
    (alone,) = planned({"procs": "1"})
    limit = 3 * alone.memory.total
    settings = [{"procs": procs, "data.batch_size": str(32 * int(procs))} for procs in ("1", "2", "4")]
    for is_shared, fitting in ((False, [True, True, True]), (True, [True, True, False])):
        rows = plan_rows(Grid("quickstart", SMALL, limit, is_shared=is_shared), settings)
        assert [isinstance(row, Row) and row.fits(limit) for row in rows] == fitting
    one, two, four = (row for row in rows if isinstance(row, Row))
    assert four.shared_bytes == 4 * four.memory.total
    assert one.largest_micro_batch is not None
    assert two.largest_micro_batch is not None
    assert four.largest_micro_batch is not None
    assert 0 < four.largest_micro_batch < 32 < two.largest_micro_batch < one.largest_micro_batch


@pytest.mark.parametrize("cores", [1, 2])
def test_a_mistake_of_ours_is_no_refused_row(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(rehearse_module, "train_step", fail)
    monkeypatch.setattr(grid_module, "num_cores", lambda: cores)
    monkeypatch.setattr(user_code, "is_own", lambda frame: False)  # as if this file were one of ours
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        plan_rows(Grid("quickstart", SMALL), [{"procs": "1"}, {"procs": "2"}])


def test_values_with_commas_are_choices() -> None:
    fixed, choices = split_choices(["train.precision=fp32,bf16", "model.widths=[8,16]", "optimizer.lr=0.1"])
    assert fixed == ["model.widths=[8,16]", "optimizer.lr=0.1"]
    assert choices == {"train.precision": ["fp32", "bf16"]}
