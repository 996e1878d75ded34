"""Where files are looked for, and what is said if they are nowhere."""

from pathlib import Path

import cv2
import numpy as np
import pytest

import paceline
from paceline.core.errors import DataError
from paceline.recipe.build_context import find_path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    return tmp_path


@pytest.mark.parametrize("place", ["", "data", "recipes", "elsewhere"])
def test_every_place_is_looked_at(place: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(here / "elsewhere"))
    (here / place / "cats").mkdir(parents=True)
    assert find_path("cats", Path("recipes")) == here / place / "cats"


def test_what_is_nowhere_is_named_once_for_each_place() -> None:
    with pytest.raises(DataError) as relative:
        find_path("cats", Path("recipes"))
    assert str(relative.value) == (
        "cats does not exist, nor does data/cats, nor does recipes/cats;"
        " give another path, or set PACELINE_DATA to the folder that holds it"
    )
    with pytest.raises(DataError) as absolute:
        find_path("/no/such/cats", Path("recipes"))
    assert str(absolute.value) == "/no/such/cats does not exist"


@pytest.mark.parametrize("place", ["a/pics", "a"])
def test_a_list_lies_in_the_root_or_where_other_files_are_looked_for(place: str, here: Path) -> None:
    (here / "a" / "pics").mkdir(parents=True)
    for label in ("ant", "bee"):
        cv2.imwrite(str(here / "a" / "pics" / f"{label}.png"), np.zeros((8, 8, 3), np.uint8))
    (here / place / "list.csv").write_text("image,label\nant.png,ant\nbee.png,bee\n", encoding="utf-8")
    file = "list.csv" if place == "a/pics" else "a/list.csv"
    train = {"dataset": "list_file", "root": "a/pics", "file": file, "split": None}
    run = paceline.build("quickstart", {"data.train": train, "data.val": train})
    assert run.train_loader.dataset.classes == ["ant", "bee"]
