"""The first step of each recipe that ships, on data that stands in for its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from fake_cuda import DEVICE, FakeCuda

from paceline.core.world import World
from paceline.engine.step import train_step
from paceline.plan.surrogate import Shape, SurrogateBuilder, SurrogateDataset
from paceline.recipe.load import load
from paceline.recipe.validate import validate

_SHAPE = Shape(64, 96, 11)  # as many classes as recipes have weights for
_SMALL = ["data.batch_size=2", "train.micro_batch_size=2", "model.weights=null", "train.compile=false"]


class StandInBuilder(SurrogateBuilder):
    """Builds a recipe on other data than its own."""

    def path(self, key: str, written: str) -> Path:
        """The path as it is written, whether or not something is there."""
        return Path(written)

    def call(self, kind: str, name: str, arguments: dict[str, Any], **supplied: Any) -> Any:
        """Create an object by name; data sets are others."""
        if kind != "dataset":
            return super().call(kind, name, arguments, **supplied)
        return SurrogateDataset(self.recipe.task.name, self.shape, name, {"ignore_index": 255, **arguments})


def first_step(recipe: str, mode: FakeCuda, out: Path) -> None:
    """Build the recipe, the model without memory, and compute one step that must not wait for the device."""
    checked = validate(load(recipe, _SMALL))
    builder = StandInBuilder(checked, World(0, 1, 0, DEVICE), _SHAPE)
    make_model = builder.model

    def make_fake_model(*args: Any) -> Any:
        with mode.all_fake():
            return make_model(*args)

    with patch.object(builder, "model", make_fake_model):
        run = builder.run(out)
    run.state.choices.channels_last = False
    run.batches.workers = 0
    run.freezing.train_mode(run.model)
    step_batch = next(iter(run.batches))
    with mode.strict():
        train_step(run, step_batch)
