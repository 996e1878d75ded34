"""`paceline find-batch`: planned first, tried second, in as many processes as train."""

import json
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.commands.find_batch import Tried, try_sizes
from paceline.core.registry import register
from paceline.tasks.classification import Classification

SMALL = ["model.widths=[4]", "train.channels_last=false"]


def test_two_processes_try_the_planned_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    limit = 2 * 2**20
    assert main(["find-batch", "quickstart", *SMALL, "--procs", "2", "--memory", str(limit), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["largest_micro_batch"] == found["planned"] > 8
    (trial,) = found["trials"]
    assert trial["fits"]
    assert 0.9 * limit < trial["tensor_bytes"] <= limit


def test_the_largest_micro_batch_fits_after_unfreezing(capsys: pytest.CaptureFixture[str]) -> None:
    """Planned and tried in the phase that needs most; evaluation, whose batch is another, is reported beside it."""
    words = [*SMALL, "model.widths=[32]", "model.freeze=[all_but_head]", "evaluate.batch_size=256", "--memory", "8MiB"]
    words += ["model.unfreeze=[{match: ['*'], at_steps: 3}]", "--json"]
    assert main(["find-batch", "quickstart", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["phase"].startswith("from step 3")
    (trial,) = found["trials"]
    assert trial["fits"]
    assert trial["tensor_bytes"] > 0.8 * 8 * 2**20
    assert 0 < found["largest_evaluation_batch"] < 256


@pytest.mark.parametrize("command", ["plan", "find-batch"])
def test_data_that_is_needed_and_missing_has_the_exit_code_of_data(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_names: None
) -> None:
    """Samples of a task of a user's cannot be assumed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    register.task("own_task")(type("OwnTask", (Classification,), {}))
    assert main([command, "image_folder", "task=own_task", "--memory", "1GiB"]) == 3
    assert "image_folder.yaml" in capsys.readouterr().err


def test_what_gets_no_memory_is_tried_smaller() -> None:
    def take(size: int) -> int | None:
        return None if size > 60 else 10 * size

    assert try_sizes(100, 500, take) == [
        Tried(100, None, fits=False),
        Tried(75, None, fits=False),
        Tried(56, 560, fits=False),
        Tried(50, 500, fits=True),
    ]


def test_what_cannot_be_is_not_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-batch", "quickstart", *SMALL, "--memory", "1KiB"]) == 0
    printed = capsys.readouterr().out
    assert "nothing fits" in printed
    assert main(["find-batch", "quickstart", *SMALL, "--memory", "100TiB"]) == 0
    assert "not tried" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--procs", "0"], "--procs"), (["optimizer.lr=x"], "optimizer.lr"), (["--image", "9"], "--image")],
)
def test_mistakes_are_named(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-batch", "quickstart", *options]) == 2
    assert named in capsys.readouterr().err


NETWORK = """
import torch
from paceline import register
@register.model("own_network")
class OwnNetwork(torch.nn.Linear):
    def __init__(self, num_classes: int) -> None:
        super().__init__(28 * 28, num_classes)
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if type(images) is torch.Tensor: raise RuntimeError("real after all")  # no fake one of a plan
        return super().forward(images.flatten(1))
"""


def test_an_error_of_a_trial_names_the_line_of_the_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_names: None
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = tmp_path / "own_network_of_a_trial.py"
    module.write_text(NETWORK, encoding="utf-8")
    assert main(["find-batch", "quickstart", "model.name=own_network", "--memory", "8MiB", "--use", str(module)]) == 1
    assert f"{module.name}:9: RuntimeError: real after all" in capfd.readouterr().err
