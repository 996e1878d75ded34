"""A state that is not that of a run, though its checksums are right, is refused before anything is taken over."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.store import Store
from paceline.core.errors import CheckpointError
from paceline.engine.state import check_state

ROOT = Path(__file__).resolve().parent.parent.parent

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT))
    hostile: Any = importlib.import_module("chaos.hostile_files.checkpoint_contents")

RECIPE = {
    "name": "saved",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4]},
    "data": {"batch_size": 8, "train": {"dataset": "fashion_small", "split": "test"}},
    "losses": ["cross_entropy"],
    "optimizer": {"name": "adamw", "lr": 0.1},
    "train": {"steps": 4, "averaging": {"name": "ema"}, "precision": "fp16"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run after two steps, each of them saved."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    run = paceline.build(folder / "recipe.json", out=folder / "run")
    for batch in run.batches:
        paceline.train_step(run, batch)
        run.store.save(run.progress.step, run.state.model_parts(), run.state.state_dict(), {})
        if run.progress.step == 2:
            return run
    raise AssertionError


@pytest.fixture
def store(run: Any, tmp_path: Path) -> Store:
    """A copy of its checkpoints."""
    return Store(Path(shutil.copytree(run.store.root, tmp_path / "checkpoints")))


def refusal(checkpoint: Checkpoint, load: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    message = str(caught.value)
    assert message.startswith(str(checkpoint.path))
    assert len(message) < 1000
    return message


def test_a_sound_one_comes_back(run: Any, store: Store) -> None:
    newest = store.newest(check_state)
    assert newest is not None
    assert newest.step == 2
    run.restore(newest)
    assert run.progress.step == 2


@pytest.mark.parametrize("name", hostile.RUN_STATES)
def test_a_hostile_one_is_refused_and_the_one_before_is_used(name: str, store: Store) -> None:
    hostile.spoil_state(store.path_of(2), hostile.RUN_STATES[name])
    path = store.path_of(2)
    with pytest.raises(CheckpointError) as caught:
        check_state(open_checkpoint(path))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 1000
    newest = store.newest(check_state)
    assert newest is not None
    assert (newest.step, len(store.rejected)) == (1, 1)


def change_moment(state: dict[str, Any]) -> None:
    moments = next(iter(state["optimizer"]["state"].values()))
    moments["exp_avg"] = moments["exp_avg"].new_zeros(99)


def replace_moment(state: dict[str, Any]) -> None:
    next(iter(state["optimizer"]["state"].values()))["exp_avg"] = "much"


MISFITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a moment of another shape": change_moment,
    "a moment in words": replace_moment,
    "a learning rate in words": lambda state: state["optimizer"]["groups"][0].update(lr="fast"),
    "betas that are a number": lambda state: state["optimizer"]["groups"][0].update(betas=0.9),
    "a group without its parameters": lambda state: state["optimizer"]["groups"][0].update(names=[]),
    "another optimizer": lambda state: state["optimizer"].update(kind="SGD"),
    "no loss scale": lambda state: state["precision"].clear(),
    "a loss scale in words": lambda state: state["precision"].update(scale="much"),
    "a negative loss scale": lambda state: state["precision"].update(scale=-1.0),
    "half a loss scale": lambda state: state["precision"].pop("skipped"),
    "an average without its counts": lambda state: state["averaging"].pop("steps"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_the_run_is_reported_as_such(name: str, run: Any, store: Store) -> None:
    checkpoint = open_checkpoint(store.path_of(2))
    MISFITS[name](checkpoint.state)
    check_state(checkpoint)
    refusal(checkpoint, run.restore)
