"""Data sets as users have them: any map-style `torch.utils.data.Dataset`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image as PILImage
from torch import Tensor

from paceline.core.errors import DamagedFileError, DataError, RecipeError
from paceline.core.user_code import user_code
from paceline.data.batch import RAGGED, KeypointNames, Sample
from paceline.data.datasets.keypoints import find_flip_pairs
from paceline.data.rng import seeded_generators
from paceline.data.split_loader import Dataset

_MOST_CHANNELS = 4  # by which [H, W, C] and [C, H, W] are distinguished where they are not as usual
_OBJECTS = {"labels": "classes", "iscrowd": "crowd"}  # torchvision's names for fields of objects, and ours
_IGNORED = -100  # by torch's losses
_UNDRAWN = np.full(1, 0.5)
_GRAY = ("1", "L", "I", "F", "I;16", "I;16B", "I;16L")


def as_dataset(name: str, made: Any) -> Dataset:
    """What was registered as a data set, if it has `read`; else the same behind that contract."""
    if hasattr(made, "read"):
        dataset: Dataset = made
        return dataset
    for method in ("__getitem__", "__len__"):
        if not hasattr(made, method):
            found = "nothing" if made is None else f"{type(made).__name__}, which has no method {method}"
            raise RecipeError(f"data set {name}: its function gave {found}; expected __getitem__ and __len__")
    return TorchDataset(name, made)


class TorchDataset:
    """A data set whose `[index]` gives `(image, target)`, an image alone, or a dict with "image".

    The target becomes a field of the sample:

    - "label": a whole number, or a vector with a number for each of the data set's `classes`.
    - "mask": a map of the image's height and width, [H, W] or [1, H, W], of any type. Transforms move it too.
    - "target": anything else that is of numbers. Transforms leave it as it is.
    - A dict: its own fields. Those of torchvision's detection sets get our names. "keypoints" are [J, 3], whose names
      the data set's `keypoint_names` has, and which of them to join by a line `limbs`.

    Images of uint8 stay so, all others become float32 with the same values. What the data set draws at random follows
    from (seed, epoch, sample).
    """

    draws = 1

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self.dataset = dataset
        whole = getattr(dataset, "dataset", None)  # of a torch.utils.data.Subset
        classes = getattr(dataset, "classes", None) or getattr(whole, "classes", None) or ()
        if not isinstance(classes, Iterable):
            raise TypeError(f"data set {name}: its `classes` are {classes!r}, expected a list of names")
        self.classes = [str(each) for each in classes]
        names = [str(each) for each in getattr(dataset, "keypoint_names", None) or ()]
        limbs = [(int(start), int(end)) for start, end in getattr(dataset, "limbs", None) or ()]
        self.joints = KeypointNames(names, find_flip_pairs(names), limbs) if names else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("path", "ignore_index", "update_digest"):
            return getattr(self.dataset, name)
        raise AttributeError(name)

    def image_sizes(self) -> NDArray[np.int64]:
        """The height and width of each image, [N, 2], by the method that torchvision's references look for."""
        find = getattr(self.dataset, "get_height_and_width", None)
        if find is None:
            expected = "add a method get_height_and_width(index), which tells the size of an image without decoding it"
            raise DataError(f"data set {self.name} does not know the sizes of its images: {expected}")
        with user_code(f"data set {self.name}: get_height_and_width", DataError):
            return np.array([find(index) for index in range(len(self))], np.int64).reshape(-1, 2)

    @cached_property
    def channels(self) -> int:
        """The number of channels of the first image."""
        return int(self.read(0)["image"].shape[-1])

    @cached_property
    def notes(self) -> list[str]:
        """What no transform does with the first sample."""
        sample = self.read(0)
        target = sample.get("target")
        if target is None or target.shape[-2:] != sample["image"].shape[-3:-1]:
            return []
        return [f"targets {list(target.shape)} have the image's size, but transforms move images and not targets"]

    def read(self, index: int, draws: NDArray[np.float64] = _UNDRAWN) -> Sample:
        """Sample `index` as it comes with this draw."""
        try:
            with user_code(f"data set {self.name}: sample {index}", DataError):
                with seeded_generators(float(draws[0])):
                    given = self.dataset[index]
                return self._sample(given)
        except DataError as error:
            if isinstance(error.__cause__, OSError):  # as Pillow has them for files that are no images
                raise DamagedFileError(str(error)) from error
            raise

    def _sample(self, given: Any) -> Sample:
        if isinstance(given, dict):
            if "image" not in given:
                raise ValueError(f'gave a dict without "image": {", ".join(map(str, given))}')
            image = image_array(given["image"])
            return {"image": image, **self._fields({name: each for name, each in given.items() if name != "image"})}
        if not isinstance(given, tuple | list):
            return {"image": image_array(given)}
        if len(given) != 2:
            raise ValueError(f"gave {len(given)} things, expected (image, target), or a dict with names")
        image, target = image_array(given[0]), given[1]
        if isinstance(target, dict):
            return {"image": image, **self._fields(target)}
        value = value_array(target)
        if value is None:
            cure = f"; for a class, give its number: self.classes.index({target!r})" if isinstance(target, str) else ""
            found = type(target).__name__
            raise ValueError(f"gave a target of type {found}, expected a number, an array or a dict{cure}")
        return {"image": image, **self._named(value, image)}

    def _named(self, value: int | NDArray[Any], image: NDArray[Any]) -> Sample:
        """The target under the name of the field that it is."""
        if isinstance(value, int):
            return {"label": self._checked(value)}
        plane = value[0] if value.ndim == 3 and len(value) == 1 else value
        if plane.shape == image.shape[-3:-1]:
            return {"mask": _mask(plane)}
        if value.ndim == 1 and len(value) == len(self.classes):
            return {"label": value.astype(np.float32)}
        return {"target": value}

    def _checked(self, label: int) -> int:
        """A label that is one of the classes, or the one that losses ignore."""
        if self.classes and not 0 <= label < len(self.classes) and label != getattr(self, "ignore_index", _IGNORED):
            last = len(self.classes) - 1
            raise ValueError(f"gave the label {label}, expected 0 to {last}: `classes` has {len(self.classes)} names")
        return label

    def _fields(self, given: dict[Any, Any]) -> Sample:
        """What is of numbers, under our names; texts and the like are left out."""
        names = _OBJECTS if "boxes" in given else {}
        fields = {str(names.get(name, name)): value_array(value) for name, value in given.items() if name != "id"}
        kept = {name: value for name, value in fields.items() if value is not None}
        if isinstance(label := kept.get("label"), int):
            self._checked(label)
        if RAGGED.isdisjoint(kept):
            return kept
        objects = _complete_objects(kept)
        if self.joints and "keypoints" in objects and objects["keypoints"].shape[1] != len(self.joints.names):
            number = objects["keypoints"].shape[1]
            raise ValueError(f"gave {number} keypoints, but `keypoint_names` has {len(self.joints.names)} names")
        for label in objects.get("classes", ()):
            self._checked(int(label))
        return objects


def _complete_objects(fields: Sample) -> Sample:
    """Fields of objects in their types, with what was left out: boxes around keypoints, areas of boxes, no crowds."""
    found = dict(fields)
    if "keypoints" in found:
        found["keypoints"] = np.asarray(found["keypoints"], np.float32)
        if found["keypoints"].ndim == 2:  # of one person
            found["keypoints"] = found["keypoints"][None]
        if found["keypoints"].ndim != 3 or found["keypoints"].shape[2] != 3:
            shape = list(np.shape(fields["keypoints"]))
            raise ValueError(
                f"gave keypoints of shape {shape}, expected [J, 3]: x, y and 0 if not labeled, else 1 or 2"
            )
        found.setdefault("boxes", [_box_around(each[each[:, 2] > 0, :2]) for each in found["keypoints"]])
    if "classes" in found:
        found["classes"] = np.asarray(found["classes"], np.int64).reshape(-1)
    if "boxes" in found:
        boxes = np.asarray(found["boxes"], np.float32)
        if boxes.size and (boxes.ndim != 2 or boxes.shape[1] != 4):
            raise ValueError(f"gave boxes of shape {list(boxes.shape)}, expected [K, 4] as x1 y1 x2 y2")
        boxes = boxes.reshape(-1, 4)
        found["boxes"] = boxes
        if (wrong := np.flatnonzero((boxes[:, 2:] < boxes[:, :2]).any(1))).size:
            box = boxes[wrong[0]].tolist()
            raise ValueError(
                f"gave the box {box}, expected x1 y1 x2 y2, with x2 ≥ x1 and y2 ≥ y1; not width and height"
            )
        found["crowd"] = np.asarray(found.get("crowd", np.zeros(len(boxes)))).astype(np.bool_).reshape(-1)
        found["area"] = np.asarray(
            found.get("area", (boxes[:, 2:] - boxes[:, :2]).clip(0).prod(1)), np.float32
        ).reshape(-1)
    return found


def _box_around(points: NDArray[Any]) -> NDArray[np.float32]:
    return np.concatenate([points.min(0), points.max(0)]) if len(points) else np.zeros(4, np.float32)


def image_array(image: Any) -> NDArray[Any]:
    """A PIL image, a tensor [C, H, W] or an array [H, W, C], as uint8 or float32 [H, W, C]; C may be missing."""
    if isinstance(image, PILImage):
        array = np.array(image if image.mode in _GRAY else image.convert("RGB"))
    elif isinstance(image, Tensor):
        array = _numpy(image)
        if array.ndim >= 3 and not (array.shape[-3] > _MOST_CHANNELS >= array.shape[-1]):
            array = np.moveaxis(array, -3, -1)
    elif isinstance(image, np.ndarray):
        array = image
        if array.ndim >= 3 and array.shape[-1] > _MOST_CHANNELS >= array.shape[-3]:
            array = np.moveaxis(array, -3, -1)
    else:
        raise TypeError(f"gave an image of type {type(image).__name__}, expected a PIL image, a tensor or an array")
    if array.ndim < 2 or array.dtype.kind not in "buif":
        raise TypeError(
            f"gave an image of {array.dtype} {list(array.shape)}, expected numbers [height, width, channels]"
        )
    array = array[..., None] if array.ndim == 2 else array
    return np.ascontiguousarray(array if array.dtype == np.uint8 else array.astype(np.float32))


def value_array(value: Any) -> int | NDArray[Any] | None:
    """A whole number, or an array: of float32, int64, uint8 or bool; None for what is not of numbers."""
    if isinstance(value, PILImage):
        array = np.array(value)
        array = np.moveaxis(array, -1, 0) if array.ndim == 3 else array
    else:
        try:
            array = _numpy(value) if isinstance(value, Tensor) else np.asarray(value)
        except ValueError:  # a list of lists of different lengths
            return None
    if array.dtype.kind not in "buif":
        return None
    if array.ndim == 0 and array.dtype.kind in "bui":
        return int(array)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    return array if array.dtype in (np.uint8, np.bool_) else array.astype(np.int64)


def _mask(plane: NDArray[Any]) -> NDArray[Any]:
    """A map in a type that transforms can move: uint8 or int16 if all of its whole numbers fit, else float32."""
    if plane.dtype.kind == "f" or plane.dtype == np.uint8 or not plane.size:
        return np.ascontiguousarray(plane)
    low, high = int(plane.min()), int(plane.max())
    kinds = [kind for kind in (np.uint8, np.int16) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max]
    return np.ascontiguousarray(plane.astype(kinds[0] if kinds else np.float32))


def _numpy(tensor: Tensor) -> NDArray[Any]:
    host = tensor.detach().cpu()
    array: NDArray[Any] = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    return array
