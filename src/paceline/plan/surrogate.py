"""Samples in place of data that is not on this machine: memory depends on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from paceline.core.errors import DataError, PacelineError
from paceline.core.torch_private import unset_fake_temporarily
from paceline.core.world import World
from paceline.data.batch import Batch, KeypointNames, Sample
from paceline.data.datasets.keypoints import find_flip_pairs, known_keypoints
from paceline.data.split_loader import SplitLoader
from paceline.plan.fake_tensors import convert_module
from paceline.recipe.build import Builder
from paceline.recipe.validate import CheckedRecipe

_OBJECTS = 8  # of a sample with boxes
_FRAMES = 300  # of a video
_LEEDS, _COCO = 14, 17  # keypoints of a person
_WITH_KEYPOINTS = ("keypoints", "keypoint_detection")  # tasks


class Shape(NamedTuple):
    """What samples are assumed to be where the data is missing."""

    height: int = 480
    width: int = 640
    num_classes: int = 100
    num_samples: int = 2**20
    """Enough for any batch."""


class SurrogateDataset:
    """Black images or videos of one size, with what the task needs beside them.

    `name` and `arguments` are of the data set that it stands for.
    """

    channels = 3

    def __init__(self, task: str, shape: Shape, name: str, arguments: Mapping[str, Any]) -> None:
        self.classes = [str(number) for number in range(shape.num_classes)]
        self.ignore_index: int | None = arguments.get("ignore_index")
        self.joints = _joints(name, arguments.get("names")) if task in _WITH_KEYPOINTS else None
        self.reads_videos = task == "video"
        self._sample = _SAMPLES.get(task, _labeled)(shape)
        if self.joints is not None:
            self._sample["keypoints"] = np.ones((len(self._sample["boxes"]), len(self.joints.names), 3), np.float32)
        self._length = shape.num_samples

    def __len__(self) -> int:
        return self._length

    def read(self, index: int) -> Sample:
        """The one sample that there is."""
        return dict(self._sample)


class SurrogateBuilder(Builder):
    """Builds from a recipe whose data may be missing.

    Samples of a task of a user's are not known: its data must be there, unless not `needs_known_task`.
    """

    def __init__(self, checked: CheckedRecipe, world: World, shape: Shape, needs_known_task: bool = True) -> None:
        super().__init__(checked, world, trains=False)
        self.missing: str = ""
        """Which data was not found, if any."""
        self.is_known_task = checked.recipe.task.name in _SAMPLES
        self._needs_known_task = needs_known_task
        self.shape = shape._replace(num_classes=_num_classes(checked) or shape.num_classes)

    def path(self, key: str, written: str) -> Path:
        """The path that the recipe gives under `key`, also if it is one of data and nothing is there."""
        try:
            return super().path(key, written)
        except DataError as error:
            if not key.startswith("data."):
                raise
            if self._needs_known_task and not self.is_known_task:
                task = f"task {self.recipe.task.name}"
                raise DataError(f"{error}; the samples of {task} are not assumed: it needs its data") from error
            self.missing = self.missing or f"{self.checked.locate(key)}: {error}"
            return Path(written)

    def model(self, loader: SplitLoader, classes: list[str]) -> nn.Module:
        """The model; one that cannot be made of fake tensors is made of real ones first.

        Lazy layers get their shapes so, and constructors of transformers copy tensors by their memory.
        """
        if not self.recipe.model.name.startswith("transformers/"):
            try:
                return super().model(loader, classes)
            except PacelineError as error:
                if UninitializedParameter.__name__ not in str(error):
                    raise
        with unset_fake_temporarily():
            model = super().model(loader, classes)
        return convert_module(model, torch.empty_like)

    def call(self, kind: str, name: str, arguments: dict[str, Any], **supplied: Any) -> Any:
        """Create an object by name; surrogates for data sets once something was missing."""
        if kind == "dataset" and self.missing:
            return SurrogateDataset(self.recipe.task.name, self.shape, name, arguments)
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


def _joints(dataset: str, names: Sequence[str] | None) -> KeypointNames:
    """The keypoints that a recipe names; else those of Leeds sports poses in their format, and COCO's in others."""
    known = known_keypoints(_LEEDS if dataset == "keypoints" else _COCO)
    assert known is not None
    return KeypointNames(list(names), find_flip_pairs(names), []) if names else known


def _image(shape: Shape) -> Sample:
    return {"image": np.zeros((shape.height, shape.width, 3), np.uint8)}


def _labeled(shape: Shape) -> Sample:
    return {**_image(shape), "label": 0}


def _video(shape: Shape) -> Sample:
    frame: NDArray[np.uint8] = _image(shape)["image"]
    return {"image": np.broadcast_to(frame, (_FRAMES, *frame.shape)), "label": 0}  # frames that share their memory


def _mask(shape: Shape) -> Sample:
    return {**_image(shape), "mask": np.zeros((shape.height, shape.width), np.uint8)}


def _objects(shape: Shape, number: int = _OBJECTS) -> Sample:
    corners = np.tile(np.array([0, 0, shape.width / 2, shape.height / 2], np.float32), (number, 1))
    area = np.full(number, shape.width * shape.height / 4, np.float32)
    fields = {"boxes": corners, "classes": np.zeros(number, np.int64), "crowd": np.zeros(number, bool), "area": area}
    return {**_image(shape), **fields}


def _instances(shape: Shape) -> Sample:
    return {**_objects(shape), "masks": np.ones((_OBJECTS, shape.height, shape.width), np.uint8)}


_SAMPLES: dict[str, Callable[[Shape], Sample]] = {
    "classification": _labeled,
    "masked_autoencoder": _labeled,
    "segmentation": _mask,
    "saliency": _mask,
    "detection": _objects,
    "instance_segmentation": _instances,
    "keypoint_detection": _objects,
    "keypoints": lambda shape: _objects(shape, 1),
    "video": _video,
}
