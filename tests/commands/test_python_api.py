"""Training and evaluation from Python: the same run directory, weights and metrics as by the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.checkpoint.reader import open_checkpoint
from paceline.cli import main
from paceline.core.errors import CheckpointError, DataError, UsageError
from paceline.loggers.jsonl import read_records

KEYS: dict[str, Any] = {
    "model.widths": [4],
    "train.epochs": None,
    "train.steps": 4,
    "train.threads": 1,
    "evaluate.every_steps": 2,
    "checkpoint.every_steps": 2,
    "logging.every_steps": 1,
    "schedule.decay": "constant",
    "schedule.warmup": "none",
    "schedule.warmup_epochs": None,
    "logging.images": False,
}


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """torch's settings, which building changes, are put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def build(out: Path, **keys: Any) -> Any:
    return paceline.build("quickstart", {**KEYS, **keys}, out)


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return open_checkpoint(out / "checkpoints" / f"step-{step:08d}").model


def timeless(out: Path) -> list[dict[str, Any]]:
    records = read_records(out / "metrics.jsonl")
    return [{name: value for name, value in each.items() if name != "clock"} for each in records]


def test_overrides_take_paths_and_numpy_numbers(tmp_path: Path) -> None:
    train = {"dataset": "idx", "root": tmp_path, "split": "train"}
    with pytest.raises(DataError, match=str(tmp_path)):  # an empty folder
        build(tmp_path / "run", **{"data.train": train})
    half = np.float32(0.5)
    run = build(
        tmp_path / "run", **{"optimizer.lr": half, "train.steps": np.int64(3), "data.drop_last": np.bool_(True)}
    )
    recipe = run.state.recipe
    assert (recipe["optimizer"]["lr"], recipe["train"]["steps"], recipe["data"]["drop_last"]) == (0.5, 3, True)


@pytest.mark.parametrize("value", [torch.tensor(1.0), [np.zeros(2)], {"betas": {1, 2}}, {np.int64(1): 1}, 1j])
def test_other_overrides_are_refused_with_key_and_type(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^optimizer.lr: .*(Tensor|ndarray|set|int64|complex)"):
        build(tmp_path / "run", **{"optimizer.lr": value})


def test_the_run_directory_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, python = tmp_path / "command", tmp_path / "python"
    overrides = [f"{key}={json.dumps(value)}" for key, value in KEYS.items()]
    assert main(["train", "quickstart", *overrides, "--out", str(command)]) == 0
    by_command = capsys.readouterr().err
    result = paceline.train(build(python))
    by_python = capsys.readouterr().err
    assert len(by_python.splitlines()) == len(by_command.splitlines())

    def files(out: Path) -> list[str]:
        found = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
        return sorted(str(path) for path in found if path.parts[0] != "tensorboard")

    assert files(python) == files(command)
    assert len(list((python / "tensorboard").iterdir())) == len(list((command / "tensorboard").iterdir()))
    assert timeless(python) == timeless(command)
    assert all(torch.equal(weights(python, 4)[name], value) for name, value in weights(command, 4).items())
    assert json.loads((python / "status.json").read_text())["state"] == "finished"

    assert result.out == python
    assert result.history == read_records(python / "metrics.jsonl")
    assert [each["step"] for each in result.history if each["split"] == "train"] == [1, 2, 3, 4]
    measured = {each["step"]: each["top1"] for each in result.history if each["split"] == "val"}
    assert set(measured) == {2, 4}
    assert result.metrics["val"]["top1"] == measured[4]
    assert result.best is not None
    assert (result.best.metric, result.best.value) == ("top1", max(measured.values()))
    assert result.best.value == measured[result.best.step]
    assert result.best.checkpoint == (python / "best").resolve()


def test_training_continues_what_the_directory_holds(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    paceline.train(build(whole))
    paceline.train(build(parts, **{"train.steps": 2}))
    run = build(parts)
    result = paceline.train(run)
    assert run.progress.step == 4
    assert timeless(parts) == timeless(whole)
    assert [each["step"] for each in result.history if each["split"] == "val"] == [2, 4]
    assert all(torch.equal(weights(parts, 4)[name], value) for name, value in weights(whole, 4).items())
    assert paceline.train(run).history == result.history, "a finished run is returned as it is"
    again = paceline.train(build(parts), fresh=True)
    assert (tmp_path / "parts~1").is_dir()
    assert len(again.history) == len(result.history)


def test_steps_of_ones_own_come_before(tmp_path: Path) -> None:
    run = build(tmp_path / "own")
    for batch in run.batches:
        paceline.train_step(run, batch)
        if run.progress.step == 2:
            break
    result = paceline.train(run)
    assert [each["step"] for each in result.history if each["split"] == "train"] == [3, 4]
    whole = tmp_path / "whole"
    paceline.train(build(whole))
    assert all(torch.equal(weights(run.out, 4)[name], value) for name, value in weights(whole, 4).items())

    other = build(whole)
    paceline.train_step(other, next(iter(other.batches)))
    with pytest.raises(CheckpointError, match=r"step 4.*step 1"):
        paceline.train(other)


def test_a_run_directory_is_opened_with_its_best_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    # By the largest loss, so that an earlier checkpoint is the best.
    best = paceline.train(build(out, **{"checkpoint.best": "loss", "checkpoint.direction": "max"})).best
    assert best is not None
    capsys.readouterr()
    assert main(["eval", str(out), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    run = paceline.build(out)
    assert run.out == out
    assert measured["step"] == best.step == 2
    assert paceline.evaluate(run, "val").metrics == measured["metrics"]
    assert all(
        torch.equal(run.state.model.state_dict()[name], value) for name, value in weights(out, best.step).items()
    )
    assert paceline.train(run).best == best
    assert run.progress.step == 4, "training goes on from the newest checkpoint, not from the best"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    run = build(tmp_path / "run", **{"data.val": None, "checkpoint.best": None, "expect": {}})
    with pytest.raises(UsageError, match=r"'test'.*data.val or data.test"):
        paceline.evaluate(run, "test")
    with pytest.raises(UsageError, match=r"'test'.*this run has val"):
        paceline.evaluate(build(tmp_path / "other"), "test")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "recipe.yaml").write_text("extends: quickstart")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        paceline.build(tmp_path / "begun")
