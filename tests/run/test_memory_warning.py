"""Before a run starts that will not fit, settings that would are named; what obviously fits is not planned."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.run import Run
from paceline.recipe.build import build
from paceline.run import memory_warning as module
from paceline.run.memory_warning import memory_warning

SMALL = {"model.widths": [4], "data.batch_size": 64, "train.channels_last": False, "train.threads": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return build("quickstart", SMALL, tmp_path_factory.mktemp("run"))


def test_what_obviously_fits_is_not_planned(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is to be planned")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert memory_warning(run) == []


def test_wide_networks_on_small_images_are_not_taken_to_fit(tmp_path: Path) -> None:
    """Of such a network the first layers alone, of which each keeps its output, take more than 400 times the input."""
    wide = build("quickstart", {**SMALL, "model.widths": [256, 256, 256]}, tmp_path)
    outputs = 4 * 64 * 28 * 28 * 256  # bytes of the output of a layer, before images are halved
    bound = module._bound(wide)
    assert bound is not None
    assert bound > 16 * outputs > 400 * 4 * 64 * 28 * 28


def test_settings_that_fit_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_memory", lambda run: 2**20)
    (text,) = memory_warning(run)
    assert "1 MiB" in text
    assert "train.micro_batch_size=" in text or "train.precision=" in text or "activation_checkpointing" in text


def test_without_a_plan_nothing_is_said(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_memory", lambda run: 2**20)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    assert memory_warning(run) == []


def test_the_phase_that_needs_most_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a name; at the start the head alone learns, and that would fit."""
    frozen = {"model.freeze": ["all_but_head"], "model.unfreeze": [{"match": ["*"], "at_steps": 3}]}
    monkeypatch.setattr(module, "_memory", lambda run: 20 * 2**20)
    changes = {**SMALL, **frozen, "model.widths": [32], "evaluate.batch_size": 1}
    (text,) = memory_warning(build("quickstart", changes, tmp_path))
    assert "from step 3" in text
