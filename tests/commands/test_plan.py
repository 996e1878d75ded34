"""`paceline plan`: the table, JSON, sizes and mistakes."""

import json
from pathlib import Path

import pytest
from PIL import Image

from paceline.cli import main
from paceline.core.errors import UsageError
from paceline.plan.devices import CUDA_CONTEXT, GIB, parse_device

SMALL = ["model.widths=[4]", "data.batch_size=8"]


def test_each_choice_is_a_row_with_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", *SMALL, "train.precision=fp32,bf16", "--memory", "1MiB", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["memory"] == 2**20
    assert [row["settings"] for row in planned["rows"]] == [
        {"procs": "1", "train.precision": "fp32"},
        {"procs": "1", "train.precision": "bf16"},
    ]
    for row in planned["rows"]:
        assert row["micro_batch_size"] == 8
        assert row["total_bytes"] == sum(row["bytes"].values())
        assert row["fits"]
        assert row["largest_micro_batch"] > 8


def test_what_does_not_fit_is_marked_and_what_would_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "quickstart", *SMALL, "train.precision=fp32", "train.activation_checkpointing=none"]
    assert main([*command, "--memory", "100KiB"]) == 0
    printed = capsys.readouterr().out
    assert " no " in printed
    assert "train.micro_batch_size=" in printed
    assert main([*command, "--memory", "1KiB"]) == 0
    assert "not even" in capsys.readouterr().out


def test_real_steps_stand_beside_the_plan_and_an_image_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "plan.png"
    words = ["train.precision=fp32", "train.activation_checkpointing=none", "--measure", "--png", str(image)]
    assert (
        main(
            [
                "plan",
                "quickstart",
                *SMALL,
                "train.steps=100",
                "train.epochs=null",
                "schedule.warmup_epochs=0.05",
                *words,
                "--json",
            ]
        )
        == 0
    )
    planned = json.loads(capsys.readouterr().out)
    assert planned["speed"]["compute_efficiency"] <= 1
    assert planned["loader_samples_per_second"] > 0
    (row,) = planned["rows"]
    assert row["estimated"]["run_seconds"] >= 100 * row["estimated"]["step_seconds"] > 0
    assert row["estimated"]["bound"] in ("compute", "data")
    assert row["flops"] > 10**6
    assert row["measured"]["tensor_bytes"] == pytest.approx(row["total_bytes"], rel=0.02)
    assert row["measured"]["resident_bytes"] > 0
    assert row["measured"]["step_seconds"] > 0
    assert min(Image.open(image).size) > 200


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("24GiB", 24 * GIB), ("24 gb", 24 * 10**9), ("512MiB", 2**29), ("1.5g", 15 * 10**8), ("1000", 1000),
        ("rtx4090", 24 * GIB - CUDA_CONTEXT), ("A100-80GB", 80 * GIB - CUDA_CONTEXT),
        ("NVIDIA RTX 3090", 24 * GIB - CUDA_CONTEXT),
    ],
)  # fmt: skip
def test_memory_is_a_size_or_a_gpu(written: str, expected: int) -> None:
    assert parse_device(written).memory == expected


def test_an_unknown_gpu_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"(?s)rtx9999.*rtx4090"):
        parse_device("rtx9999")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--procs", "two"], "--procs"), (["--procs", "0"], "--procs"), (["--image", "640"], "--image"),
        (["--classes", "0"], "--classes"), (["train.precision=fp32,fp8"], "train.precision"),
        (["optimizer.lr=x"], "optimizer.lr"), (["--memory", "lots"], "--memory"),
    ],
)  # fmt: skip
def test_mistakes_are_named(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "quickstart", *SMALL, "train.activation_checkpointing=none", *options])
    printed = capsys.readouterr()
    assert named in printed.err
    assert code == (0 if named == "train.precision" else 2)  # the row that is possible is planned
