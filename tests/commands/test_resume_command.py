"""What a run is continued from: a checkpoint that is whole, with the recipe and the data that it was saved with."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.store import Store
from paceline.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT))
    changed: Any = importlib.import_module("chaos.changed_data")
    hostile: Any = importlib.import_module("chaos.hostile_files.checkpoint_contents")

Train = Callable[..., int]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run of 4 steps, for each kind of data set."""
    home = tmp_path_factory.mktemp("begun")
    for dataset in ("image_folder", "list_file"):
        folder = home / dataset
        changed.make(folder / "data")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            Path("recipe.json").write_text(json.dumps(changed.recipe(dataset, 4)))
            assert main(["train", "recipe.json"]) == 0
    return home


@pytest.fixture
def train(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Continues a copy of the run for some more steps, after a change of its data."""
    monkeypatch.chdir(tmp_path)

    def go_on(dataset: str, change: Callable[[Path], object], *words: str, steps: int = 6) -> int:
        if not Path("data").exists():
            shutil.copytree(begun / dataset, tmp_path, symlinks=True, dirs_exist_ok=True)
            change(tmp_path / "data")
        Path("recipe.json").write_text(json.dumps(changed.recipe(dataset, steps)))
        return main(["train", "recipe.json", *words])

    return go_on


def steps() -> list[int]:
    return [int(path.name[5:]) for path in sorted(Path("runs/changed/checkpoints").glob("step-*"))]


def test_there_are_at_least_ten_kinds_of_change() -> None:
    assert len(changed.CHANGES) >= 10


@pytest.mark.parametrize("name", changed.CHANGES)
def test_other_data_is_refused_and_named(name: str, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    dataset, change, word = changed.CHANGES[name]
    assert train(dataset, change) == 3
    errors = capsys.readouterr().err
    assert word in errors
    assert "Traceback" not in errors
    assert steps() == [4]


@pytest.mark.parametrize("name", changed.SAME)
def test_the_same_data_goes_on(name: str, train: Train) -> None:
    assert train(*changed.SAME[name]) == 0
    assert steps() == [4, 6]


def test_accepted_data_is_reported_once_and_is_that_of_the_run_from_then_on(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, change, word = changed.CHANGES["images added"]
    assert train(dataset, change, "--accept-data") == 0
    assert word in capsys.readouterr().err
    saved = open_checkpoint(Path("runs/changed")).state["data"]
    assert {split: each["num_samples"] for split, each in saved.items()} == {"train": 36, "val": 9}
    assert train(dataset, change, steps=8) == 0
    assert word not in capsys.readouterr().err
    assert steps() == [4, 6, 8]


def test_eval_warns_of_other_data(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("image_folder", lambda data: None) == 0
    capsys.readouterr()
    assert main(["eval", "runs/changed", "--json"]) == 0
    printed = capsys.readouterr()
    assert "warning" not in printed.err
    step = json.loads(printed.out)["step"]
    assert Path("runs/changed/best").readlink().name == f"step-{step:08d}"
    Path("data/val/cat/cat1.png").unlink()
    assert main(["eval", "runs/changed"]) == 0
    printed = capsys.readouterr()
    assert "warning: " in printed.err
    assert "val: 9 samples became 8" in printed.err
    assert f", step {step}, " in printed.err


@pytest.mark.parametrize("name", ["a list for a state", "an infinite step", "a state 900 deep"])
def test_a_hostile_checkpoint_is_passed_over(name: str, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("image_folder", lambda data: None) == 0
    hostile.ONE_PROCESS[name](Path("runs/changed/checkpoints/step-00000006"))
    capsys.readouterr()
    assert main(["eval", "runs/changed", "--checkpoint", "runs/changed/checkpoints/step-00000006"]) == 4
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert "step-00000006" in errors
    assert train("image_folder", lambda data: None, steps=8) == 0
    errors = capsys.readouterr().err
    assert "not used: " in errors
    assert "step-00000004, step 4" in errors
    assert steps() == [4, 6, 7, 8]  # the step of an evaluation is saved too


def test_a_state_with_a_recipe_that_is_none_is_passed_over(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("image_folder", lambda data: None) == 0
    folder = Path("runs/changed/checkpoints/step-00000006")
    for name, change in hostile.RECIPES.items():
        hostile.spoil_state(folder, lambda state, change=change: change(state["recipe"]))
        capsys.readouterr()
        assert train("image_folder", lambda data: None) == 0, name
        [line] = [line for line in capsys.readouterr().err.splitlines() if "not used: " in line]
        assert "step-00000006: state.json: recipe: " in line
        assert len(line) < 1000
    hostile.spoil_state(folder, lambda state: state["recipe"]["data"].update(batch_size=5))  # that is another recipe
    assert train("image_folder", lambda data: None) == 4
    assert "data.batch_size: was 5" in capsys.readouterr().err


def test_where_no_checkpoint_can_be_used_nothing_is_begun(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("image_folder", lambda data: None, steps=4) == 0
    metrics = Path("runs/changed/metrics.jsonl").read_bytes()
    (Path("runs/changed/checkpoints/step-00000004") / "model.safetensors").write_bytes(b"")
    assert train("image_folder", lambda data: None) == 4
    assert "--fresh" in capsys.readouterr().err
    assert Path("runs/changed/metrics.jsonl").read_bytes() == metrics
    assert train("image_folder", lambda data: None, "--fresh") == 0
    assert steps() == [4, 6]


def test_a_copy_without_links_goes_on(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("image_folder", lambda data: None, steps=4) == 0
    Path("runs/changed").rename("original")
    shutil.copytree("original", "runs/changed")  # follows links, as cp -rL does
    assert main(["eval", "runs/changed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 4
    assert train("image_folder", lambda data: None) == 0
    assert "was at the path of the link to the best checkpoint; it is now" in capsys.readouterr().err
    assert Path("runs/changed/best").is_symlink()
    assert steps() == [4, 6]


@pytest.mark.parametrize("kind", ["[1]", '{"state": ' + "[" * 9000, '{"state": 3}'])
def test_a_status_of_any_content_is_no_crash(kind: str, train: Train) -> None:
    assert train("image_folder", lambda data: None, steps=4) == 0
    Path("runs/changed/.lock").unlink(missing_ok=True)
    shutil.rmtree("runs/changed/checkpoints")
    Path("runs/changed/status.json").write_text(kind)
    assert train("image_folder", lambda data: None, steps=4) == 2


def test_the_state_of_a_run_names_its_data(begun: Path) -> None:
    store = Store(begun / "image_folder/runs/changed/checkpoints")
    newest = store.newest()
    assert newest is not None
    data = newest.state["data"]["train"]
    assert (data["classes"], data["num_samples"], len(data["digest"])) == (["cat", "dog", "owl"], 27, 32)
