"""Every recipe that ships can be planned, whether or not its data is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.data import stick_people, synthetic
from paceline.plan import rehearse
from paceline.plan.grid import Grid, Refused, Row, plan_rows
from paceline.plan.surrogate import Shape, SurrogateBuilder
from paceline.recipe.load import load, shipped_recipes
from paceline.recipe.validate import validate

_SMALL = ["data.batch_size=2", "train.micro_batch_size=2"]
_SHAPE = Shape(64, 96, 10)
_NEED_DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "video": ("video_list", {"file": "video/train.csv"}),
    "keypoints": ("coco", {"root": "keypoints", "annotations": "train.json", "keypoints": True, "per_object": True}),
}
"""Tasks whose samples a plan does not assume, and data sets that stand in for those of their recipes."""
_NOT_PLANNED: dict[str, str] = {}
"""Recipes that a plan refuses, and a part of the reason."""


class StandInBuilder(SurrogateBuilder):
    """Builds a recipe whose data is missing; data sets of tasks that need theirs are small ones that were drawn."""

    def path(self, key: str, written: str) -> Path:
        """The path as it is written, if the data set is another one."""
        return Path(written) if self.recipe.task.name in _NEED_DATA else super().path(key, written)

    def call(self, kind: str, name: str, arguments: dict[str, Any], **supplied: Any) -> Any:
        """Create an object by name."""
        if kind == "dataset" and self.recipe.task.name in _NEED_DATA:
            name, arguments = _NEED_DATA[self.recipe.task.name]
        return super().call(kind, name, arguments, **supplied)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what stands in for videos and keypoints."""
    folder = tmp_path_factory.mktemp("drawn")
    for task, write in {"video": synthetic.write_video, "keypoints": stick_people.write_keypoints}.items():
        (folder / task).mkdir()
        write(folder / task, 4, 0)
    return folder


@pytest.fixture
def _without_data(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drawn)
    monkeypatch.setenv("PACELINE_DATA", str(drawn / "none"))


@pytest.mark.usefixtures("_without_data")
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_is_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "SurrogateBuilder", StandInBuilder)
    (row,) = plan_rows(Grid(name, _SMALL, shape=_SHAPE), [{"procs": "1"}])
    if name in _NOT_PLANNED:
        assert isinstance(row, Refused)
        assert _NOT_PLANNED[name] in row.reason
        return
    assert isinstance(row, Row), row
    assert row.micro_batch_size == 2
    assert min(row.memory.parts["parameters"], row.memory.parts["activations"], row.cost.flops) > 0


@pytest.mark.usefixtures("_without_data")
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_tasks_that_need_their_data_say_so(name: str) -> None:
    if validate(load(name)).recipe.task.name in _NEED_DATA:
        (row,) = plan_rows(Grid(name, _SMALL, shape=_SHAPE), [{"procs": "1"}])
        assert isinstance(row, Refused)
        assert "does not exist" in row.reason
