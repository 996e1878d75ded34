"""Every recipe that ships can be rehearsed, whether or not its data is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.data import stick_people, synthetic
from paceline.plan import rehearse
from paceline.plan.grid import Grid, Refused, plan_rows
from paceline.plan.surrogate import Shape, SurrogateBuilder
from paceline.recipe.load import shipped_recipes

_SMALL = ["data.batch_size=2", "train.micro_batch_size=2"]
_SHALLOW = {
    "finetune": ["model.args={img_size: 288, depth: 2}"],
    "mae_vit_base": ["model.encoder_args={depth: 2}", "model.decoder_depth=1"],
    "mae_vit_base_finetune": ["model.args={global_pool: avg, depth: 2}"],
    "mae_vit_base_linear_probe": ["model.args={depth: 2}"],
}
"""Fewer of many equal blocks: each takes as long as the first."""
_SHAPE = Shape(64, 96, 10)
_NEED_DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "video": ("video_list", {"file": "video/train.csv"}),
    "keypoints": ("coco", {"root": "keypoints", "annotations": "train.json", "keypoints": True, "per_object": True}),
}
"""Tasks whose samples a plan does not assume, and data sets that stand in for those of their recipes."""
_REFUSED = frozenset[str]()
"""Recipes that cannot be planned. None so far: docs/plan.md names models that cannot, such as Faster R-CNN."""


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
@pytest.mark.parametrize("name", sorted(shipped_recipes().keys() - _REFUSED))
def test_a_step_of_each_recipe_is_rehearsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step alone, without what a plan does by arithmetic: others take less time, and the same operators."""
    monkeypatch.setattr(rehearse, "SurrogateBuilder", StandInBuilder)
    checked = Grid(name, [*_SMALL, *_SHALLOW.get(name, ())]).check({"procs": "1"})
    with rehearse.rehearse(checked, 1, _SHAPE) as rehearsal:
        assert rehearsal.timeline.sum(axis=1).max() > sum(each.nbytes for each in rehearsal.run.model.parameters())


@pytest.mark.usefixtures("_without_data")
@pytest.mark.parametrize("name", [name for name, path in shipped_recipes().items() if path.parent.name in _NEED_DATA])
def test_tasks_that_need_their_data_say_so(name: str) -> None:
    (row,) = plan_rows(Grid(name, _SMALL, shape=_SHAPE), [{"procs": "1"}])
    assert isinstance(row, Refused)
    assert "does not exist" in row.reason
    assert "needs its data" in row.reason
