"""A run of each vision task that is killed on its way ends with the bits of one that never was.

Sizes of images and speeds of clips change from step to step, and crops and dropout are drawn: all of it comes again.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forkserver import Done, paceline
from support.sample_recipes import PADDED, SCRIPTS, STEPS, TASKS, predictions, records, settings_kept, write_sample

from paceline import cli

DIES_AT, NEWEST = 6, 4  # the step, counted from 1 and of the second epoch, and the checkpoint before it
TENSORS = ("model.safetensors", "state.safetensors")


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with settings_kept():
        yield


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe file of each task."""
    folder = tmp_path_factory.mktemp("recipes")
    return {kind: write_sample(kind, folder) for kind in (*TASKS, *PADDED)}


def train(recipe: Path, out: Path, *words: str) -> None:
    """The command in this process, to its end."""
    assert cli.main(["train", str(recipe), *words, "--out", str(out)]) == 0


def train_and_die(recipe: Path, out: Path, *words: str) -> Done:
    """The command in processes of its own, the last of which is killed."""
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    dies = {"DIE_AT": str(DIES_AT), "DIE_BEHIND": str(checkpoint(out, NEWEST)), "PYTHONPATH": path}
    return paceline(out.parent, "train", recipe, *words, "--out", out, "--use", "dying_updates", **dies)


def checkpoint(run: Path, step: int = STEPS) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def state(run: Path) -> dict[str, Any]:
    """All that resumes beside tensors, but for the number of processes and the module that ends them."""
    found: dict[str, Any] = json.loads((checkpoint(run) / "state.json").read_text(encoding="utf-8"))
    inner = found.get("state", found)
    del inner["recipe"]["use"]
    return {name: value for name, value in inner.items() if name != "world"}


def assert_same(broken: Path, whole: Path) -> None:
    """Weights, the optimizer's state and whatever else resumes, metrics and saved predictions are bit-identical."""
    for name in TENSORS:
        assert (checkpoint(broken) / name).read_bytes() == (checkpoint(whole) / name).read_bytes(), name
    assert state(broken) == state(whole)
    assert records(broken) == records(whole)
    assert predictions(broken) == predictions(whole)


@pytest.mark.parametrize("kind", [*TASKS, *PADDED])
def test_a_killed_run_goes_on_to_the_bit(
    kind: str, recipes: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    killed = train_and_die(recipes[kind], broken)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in broken.glob("checkpoints/step-*")) == ["step-00000002", "step-00000004"]
    capsys.readouterr()
    train(recipes[kind], broken)
    assert f"weights  from {checkpoint(broken, NEWEST)}, step {NEWEST}" in capsys.readouterr().err
    train(recipes[kind], whole)
    assert_same(broken, whole)
    assert [each["step"] for each in records(whole) if each["split"] == "val"] == [4, STEPS]


def test_two_processes_one_of_which_is_killed_end_like_one_that_never_was(
    recipes: dict[str, Path], tmp_path: Path
) -> None:
    """The CEL's denominators are summed over processes; images of one step have one size in both of them."""
    whole, broken, world = tmp_path / "whole", tmp_path / "broken", "train.reproducible=world"
    done = train_and_die(recipes["saliency"], broken, world, "--procs", "2")
    assert done.returncode == 0, done.stderr
    assert "process 1 was killed by SIGKILL; restarting" in done.stderr
    assert f"weights  from {checkpoint(broken, NEWEST)}, step {NEWEST}" in done.stderr
    train(recipes["saliency"], whole, world)
    assert_same(broken, whole)
