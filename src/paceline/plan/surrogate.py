"""Samples in place of data that is not on this machine: memory depends on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.parameter import UninitializedParameter

from paceline.core.errors import DataError, PacelineError
from paceline.core.world import World
from paceline.data.batch import Batch, Sample
from paceline.data.split_loader import SplitLoader
from paceline.plan.fake_tensors import convert_module
from paceline.recipe.build import Builder
from paceline.recipe.validate import CheckedRecipe

_OBJECTS = 8  # of a sample with boxes
_LENGTH = 2**20  # samples of a data set: enough for any batch


class Shape(NamedTuple):
    """What samples are assumed to be where the data is missing."""

    height: int = 480
    width: int = 640
    num_classes: int = 100


class SurrogateDataset:
    """Black images of one size, with what the task needs beside them."""

    def __init__(self, task: str, shape: Shape, ignore_index: int | None = None) -> None:
        self.classes = [str(number) for number in range(shape.num_classes)]
        self.channels = 3
        self.ignore_index = ignore_index
        self._sample = _sample(task, shape)

    def __len__(self) -> int:
        return _LENGTH

    def read(self, index: int) -> Sample:
        """The one sample that there is."""
        return dict(self._sample)


class SurrogateBuilder(Builder):
    """Builds from a recipe whose data may be missing."""

    def __init__(self, checked: CheckedRecipe, world: World, shape: Shape) -> None:
        super().__init__(checked, world, trains=False)
        self.missing: str = ""
        """What was not found, if anything."""
        self._shape = shape._replace(num_classes=_num_classes(checked) or shape.num_classes)

    def path(self, key: str, written: str) -> Path:
        """The path that the recipe gives under `key`, also if nothing is there."""
        try:
            return super().path(key, written)
        except DataError as error:
            if self.recipe.task.name not in _FIELDS:
                task = f"task {self.recipe.task.name}"
                raise DataError(f"{error}; a plan of {task} needs its data, whose samples are not assumed") from error
            self.missing = self.missing or str(error)
            return Path(written)

    def model(self, loader: SplitLoader, classes: list[str]) -> nn.Module:
        """The model; lazy layers, which cannot be made of fake tensors, get their shapes as real ones."""
        try:
            return super().model(loader, classes)
        except PacelineError as error:
            if UninitializedParameter.__name__ not in str(error):
                raise
        with unset_fake_temporarily():
            model = super().model(loader, classes)
        return convert_module(model, torch.empty_like)

    def check_data(self, loaders: Mapping[str, SplitLoader]) -> None:
        """Nothing: other ranks are not there, or assume the same samples."""

    def call(self, kind: str, name: str, arguments: dict[str, Any], **supplied: Any) -> Any:
        """Create an object by name; surrogates for data sets once something was missing."""
        if kind == "dataset" and self.missing:
            return SurrogateDataset(self.recipe.task.name, self._shape, arguments.get("ignore_index"))
        return super().call(kind, name, arguments, **supplied)


def _num_classes(checked: CheckedRecipe) -> int | None:
    """The number of classes that a recipe states, in its model or by the names of its data; None if it states none."""
    recipe = checked.recipe
    if recipe.task.name == "saliency":
        return 1
    names = (recipe.data.train.model_extra or {}).get("classes")
    return recipe.model.num_classes or (len(names) if isinstance(names, list) else None)


def largest_draw(loader: SplitLoader, number: int, one: Callable[[], Batch]) -> Tensor:
    """What batch transform `number`, which does the same to all of a step, has to draw to make the largest images.

    `one` makes a batch of one sample to try it on.
    """
    transform = loader.batch_transforms[number]

    def pixels(draw: Tensor) -> int:
        images: Tensor = transform(one(), draw)["image"]
        return images.numel()

    # Arrays, of which transforms read numbers: those of tensors cannot be read where tensors are fake.
    draws: Any = [np.full((1, transform.draws), share) for share in np.linspace(0, 1, 65)[:-1]]
    largest: Tensor = max(draws, key=pixels)
    return largest


def _boxes(shape: Shape) -> Sample:
    corners = np.tile(np.array([0, 0, shape.width / 2, shape.height / 2], np.float32), (_OBJECTS, 1))
    area = np.full(_OBJECTS, shape.width * shape.height / 4, np.float32)
    return {"boxes": corners, "classes": np.zeros(_OBJECTS, np.int64), "crowd": np.zeros(_OBJECTS, bool), "area": area}


_FIELDS: dict[str, Callable[[Shape], Sample]] = {
    "classification": lambda shape: {"label": 0},
    "masked_autoencoder": lambda shape: {"label": 0},
    "segmentation": lambda shape: {"mask": np.zeros(shape[:2], np.uint8)},
    "saliency": lambda shape: {"mask": np.zeros(shape[:2], np.uint8)},
    "detection": _boxes,
}


def _sample(task: str, shape: Shape) -> Sample:
    image = np.zeros((shape.height, shape.width, 3), np.uint8)
    return {"image": image, **_FIELDS[task](shape)}
