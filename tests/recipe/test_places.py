"""Where files are looked for, and what is said if they are nowhere."""

from pathlib import Path

import pytest

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
