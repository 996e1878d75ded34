"""Every recipe that ships can be rehearsed, whether or not its data is here."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.commands.show import model_table
from paceline.plan.grid import Grid
from paceline.plan.rehearse import rehearse
from paceline.plan.surrogate import Shape
from paceline.recipe.load import shipped_recipes

_SMALL = ["data.batch_size=2", "train.micro_batch_size=2"]
_SHALLOW = {
    "finetune": ["model.args={img_size: 288, depth: 2}"],
    "mae_vit_base": ["model.encoder_args={depth: 2}", "model.decoder_depth=1"],
    "mae_vit_base_finetune": ["model.args={global_pool: avg, depth: 2}"],
    "mae_vit_base_linear_probe": ["model.args={depth: 2}"],
    "keypointrcnn_resnet50_fpn": ["data.train.transforms.0.min_size=96"],
    **{f"{name}_resnet50_fpn": ["data.train.transforms.0.size=96"] for name in ("fasterrcnn", "maskrcnn", "retinanet")},
}
"""Fewer of many equal blocks, of which each takes as long as the first; smaller images, which have fewer anchors."""
_SHAPE = Shape(64, 96, 10)
_REFUSED = frozenset[str]()
"""Recipes that cannot be planned. None so far: docs/plan.md names models that cannot, such as Faster R-CNN."""


@pytest.fixture
def _without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)


@pytest.mark.usefixtures("_without_data")
@pytest.mark.parametrize("name", sorted(shipped_recipes().keys() - _REFUSED))
def test_a_step_of_each_recipe_is_rehearsed(name: str) -> None:
    """The first step alone, without what a plan does by arithmetic: others take less time, and the same operators."""
    checked = Grid(name, [*_SMALL, *_SHALLOW.get(name, ())]).check({"procs": "1"})
    with rehearse(checked, 1, _SHAPE) as rehearsal:
        assert rehearsal.timeline.sum(axis=1).max() > sum(each.nbytes for each in rehearsal.run.model.parameters())
        if checked.recipe.task.name not in ("detection", "instance_segmentation"):  # whose predictions depend on values
            rows, flops = model_table(rehearsal.run)
            assert rows[0]["flops"] == flops > 0


@pytest.mark.usefixtures("_without_data")
@pytest.mark.parametrize(
    ("name", "evaluated"),
    [
        ("mae_fashion", []),  # takes images of 28 × 28 alone, and evaluates them as they are
        ("fights", ["val"]),  # cuts more out of a video than the assumed one has
        ("camvid", ["val", "test"]),
    ],
)
def test_evaluation_is_rehearsed_unless_what_is_assumed_does_not_suit(name: str, evaluated: list[str]) -> None:
    checked = Grid(name, [*_SMALL, "evaluate.batch_size=1"]).check({"procs": "1"})
    with rehearse(checked, 1, _SHAPE) as rehearsal:
        assert [each.split for each in rehearsal.evaluations(is_cpu=False)] == evaluated
