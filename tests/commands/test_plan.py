"""`paceline plan`: the table, JSON, sizes and mistakes."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from paceline.cli import main
from paceline.core.errors import UsageError
from paceline.plan.devices import CUDA_CONTEXT, GIB, parse_device

SMALL = ["model.widths=[4]", "data.batch_size=8", "evaluate.batch_size=1"]


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


def test_the_phase_that_needs_most_is_named_and_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "quickstart", "model.widths=[8]", "train.precision=fp32", "train.activation_checkpointing=none"]
    words += ["model.freeze=[all_but_head]", "model.unfreeze=[{match: ['*'], at_epochs: 2}]", "data.batch_size=256"]
    for evaluated, name in ((1, "from epoch 2, after unfreezing stages"), (4096, "evaluation of val")):
        changed = [f"evaluate.batch_size={evaluated}", "--memory", "1MiB"]
        assert main([*words, *changed, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["phase"].startswith(name)
        assert row["total_bytes"] == row["phases"][row["phase"]] == max(row["phases"].values())
        assert not row["fits"]
        assert main([*words, *changed, *row["changes_to_fit"], "--json"]) == 0
        (fitting,) = json.loads(capsys.readouterr().out)["rows"]
        assert fitting["fits"]
        assert fitting["total_bytes"] > 0.9 * 2**20


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
        ("24GiB", 24 * GIB), ("24 gb", 24 * 10**9), ("512MiB", 2**29), ("1.5g", 15 * 10**8), ("1048576", 2**20),
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
    ("written", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("Tesla T4", "t4"),
        ("Tesla P100-PCIE-16GB", "p100"),
    ],
)
def test_a_gpu_as_its_driver_calls_it(written: str, expected: str) -> None:
    assert parse_device(written).name == expected


@pytest.mark.parametrize(
    "written", ["NVIDIA GeForce RTX 4070 Ti", "NVIDIA GeForce RTX 3080 Laptop GPU", "NVIDIA H100 NVL"]
)
def test_a_gpu_that_is_like_another_is_not_taken_for_it(written: str) -> None:
    with pytest.raises(UsageError, match="expected a size"):
        parse_device(written)


@pytest.mark.parametrize("written", ["24", "24564", "0", "0GiB"])
def test_a_size_without_its_unit_is_refused(written: str) -> None:
    with pytest.raises(UsageError, match=f"--memory {written}: "):
        parse_device(written)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--procs", "two"], "--procs"), (["--procs", "0"], "--procs"), (["--image", "640"], "--image"),
        (["--classes", "0"], "--classes"), (["train.precision=fp32,fp8"], "train.precision"),
        (["optimizer.lr=x"], "optimizer.lr"), (["--memory", "lots"], "--memory lots"),
        (["--device", "rtx9999"], "--device rtx9999"),
        (["--memory", "a100", "--device", "h100"], "--device h100 --memory a100"),
    ],
)  # fmt: skip
def test_mistakes_are_named(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "quickstart", *SMALL, "train.activation_checkpointing=none", *options])
    printed = capsys.readouterr()
    assert named in printed.err
    assert code == (0 if named == "train.precision" else 2)  # the row that is possible is planned


def test_a_gpu_may_have_less_memory_than_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.activation_checkpointing=none", "train.precision=fp32", "--json"]
    for given in (["--memory", "1GiB", "--device", "a100"], ["--device", "a100", "--memory", "1GiB"]):
        assert main(["plan", "quickstart", *SMALL, *words, *given]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["device"], answer["memory"]) == ("a100-40gb", 2**30)


def _network(forward: str) -> str:
    return f"""
import torch
from torch import nn
from paceline import register


@register.dataset("own_images")
class OwnImages(torch.utils.data.Dataset):
    classes = list("0123456789")

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(1, 28, 28), index % 10


@register.model("own_network")
class OwnNetwork(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        {forward}
"""


def test_lazy_layers_are_planned_and_what_a_model_prints_is_not_in_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_names: None
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = tmp_path / "own_network_that_prints.py"
    module.write_text(_network("print(images.shape); return self.layers(images)"), encoding="utf-8")
    words = ["plan", "quickstart", "model.name=own_network", "train.precision=fp32", "--memory", "1GiB", "--json"]
    words += ["data.train.dataset=own_images", "data.val.dataset=own_images"]
    assert main([*words, "train.activation_checkpointing=none", "--use", str(module)]) == 0
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["rows"]
    weights = 4 * (28 * 28 * 16 + 16 + 16 * 10 + 10)
    assert weights <= row["bytes"]["parameters"] < weights + 64  # scalars, such as those of the loss
    assert row["bytes"]["optimizer"] >= 2 * weights
    assert "torch.Size" in printed.err


@pytest.mark.parametrize(
    ("forward", "named", "code"),
    [
        ("return self.layers(images) * float(images.numpy().mean())", "numpy", 2),
        ("return self.layers[3](images)", "dim", 2),
        ("return self.layers(images.repeat_interleave(images[:, 0, 0, 0].long(), 0))", "repeat_interleave", 2),
        ("return self.layers(images) + 1 // 0", "ZeroDivisionError", 1),
        ("raise RuntimeError('not today')", "not today", 1),
    ],
)
def test_a_line_of_the_model_that_cannot_be_rehearsed_or_is_wrong_is_named(
    forward: str,
    named: str,
    code: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_names: None,
) -> None:
    """What fake tensors cannot follow is a refused row, a mistake is an error."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = tmp_path / f"own_network_{abs(hash(forward))}.py"
    module.write_text(_network(forward).replace("Lazy", "").replace("(16)", "(784, 16)"), encoding="utf-8")
    words = ["train.precision=fp32", "train.activation_checkpointing=none", "--memory", "1GiB", "--use", str(module)]
    assert main(["plan", "quickstart", "model.name=own_network", *words]) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert named in line
    assert module.name in line
    assert ":25: " in line or "line 25" in line


def test_what_cannot_be_rehearsed_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_names: None
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = tmp_path / "own_network_that_reads.py"
    forward = "return self.layers(images) * float(images.detach().numpy().mean())"
    module.write_text(_network(forward).replace("Lazy", "").replace("(16)", "(784, 16)"), encoding="utf-8")
    words = ["plan", "quickstart", "model.name=own_network", "train.precision=fp32,fp8", "--use", str(module)]
    image = tmp_path / "plan.png"
    words += ["train.activation_checkpointing=none", "data.batch_size=8", "--measure", "--png", str(image)]
    assert main([*words, "--json"]) == 0
    measured, refused = json.loads(capsys.readouterr().out)["rows"]
    assert "numpy" in measured["reason"]
    assert measured["measured"]["tensor_bytes"] > 4 * 4 * (784 * 16)  # weights, gradients and two moments
    assert "measured" not in refused
    assert not image.exists()
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "predicted beside measured" in printed.out
    assert "–" in printed.out
    assert "memory of each" not in printed.out
