"""Samples and batches: what they hold, the types that are accepted, and how samples are collated.

Images are uint8, from 0 to 255, or floats, which reach the model unchanged, as float32. Other integers are refused:
whether 16 bits mean 0 to 1 or 0 to 65,535 is for the data set to say. Tensors become arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.padding import Padding, inside_sizes
from paceline.data.skip_list import Skipped

Ids = NDArray[np.int64]
"""The numbers of samples in their data set."""
Image = NDArray[Any]
"""Of uint8 or float32: [H, W, C], or [T, H, W, C] of a clip."""

_PIXELS, _FLOATS = np.dtype(np.uint8), np.dtype(np.float32)
_EXPECTED = "expected uint8, from 0 to 255, or float32, which the model gets as it is (float16 and float64 become it)"

Sample = dict[str, Any]
"""One example as a data set reads it: "image" as uint8 [H, W, C], or [T, H, W, C] of a video, and what the task needs.

Images may also be of floats, which models get as they are; tensors are as good as arrays.

- "label": a whole number, or float32 [num_classes] of 0 and 1 where several may hold.
- "mask": uint8 [H, W], or of floats (depth).
- "target": what a user's data set gives beside an image and is none of these: an array of any shape.
- Of each of K objects: "boxes" float32 [K, 4] as x1 y1 x2 y2, in pixels from the image's left upper corner; "classes"
  int64 [K]; "masks" uint8 0/1 [K, H, W]; "keypoints" float32 [K, J, 3] as x, y and 0 not labeled, 1 hidden or
  2 visible; "crowd" bool [K]; "area" float32 [K].
- "video": the number of the video that a sample is a clip of, if clips are samples; metrics join those of one video.
- "size": int64 [2], height and width before any transform; "image_id": the number that the data set's files give it.
"""

RAGGED = frozenset({"boxes", "classes", "masks", "keypoints", "crowd", "area"})
"""Fields of objects, of which samples have different numbers: a batch holds a list of them, a tensor a sample."""
TRUTHS = {"mask": "truth"} | {
    name: f"truth_{name}" for name in ("boxes", "classes", "masks", "crowd", "area", "keypoints")
}
"""Under which names masks and objects are kept as they were read, where predictions are measured on those."""
LIST_FIELDS = RAGGED | frozenset(TRUTHS.values())
"""All fields that a batch holds as a list: those of objects, and masks of the sizes in which they were read."""

IMAGE_SIZE = "image_size"
_ONE_SIZE = "add a transform that gives one size, such as {name: resize, size: [224, 224]}"
_PADDING_TASKS = (
    "or use a task that pads images: detection, instance_segmentation, keypoint_detection, segmentation, saliency, or"
    " your own with pads_images = True"
)
"""int64 [N, 2], height and width of each image without its padding; only in batches in which an image is padded."""
ON_HOST = ("id", "crowd", "truth_masks", IMAGE_SIZE)
"""Fields that stay on the host: Python decides by them, and must not wait for a device; masks as read are large."""

TARGETS = ("target", "label", "mask")
"""Fields that a loss or a metric of a user's may be given as its target, the first that is there."""


LABEL_FORM = (
    "a label is one whole number, or a float for each class: return int(label) from the data set; to predict numbers,"
    ' use a task of your own: register.task("regression")(paceline.Task)'
)
"""What a data set must give as a label."""
_FORMS = {"label": LABEL_FORM, "mask": "a mask is [H, W], of its image's height and width"}


class KeypointNames(NamedTuple):
    """What keypoints are called, which of them are left and right of a kind, and which to join by a line."""

    names: list[str]
    pairs: list[tuple[int, int]]
    limbs: list[tuple[int, int]]

    @classmethod
    def from_json(cls, content: Any) -> KeypointNames:
        """The names as JSON has them, with lists for tuples."""
        names, pairs, limbs = content
        return cls(list(names), [(a, b) for a, b in pairs], [(a, b) for a, b in limbs])


class MissingFieldError(DataError, KeyError):
    """A field that a batch does not have; the message names those that it has."""

    def __str__(self) -> str:
        return str(self.args[0])


class Batch(dict[str, Any]):
    """Samples stacked by field: "id" [N] always, "image" [N, C, H, W], and what the task needs ("label", ...).

    Images of a video are [N, C, T, H, W]; fields of objects (`RAGGED`) are lists of N tensors. Images of different
    sizes are padded with zeros on the right and below; "image_size" [N, 2] is then there, on the host.
    """

    skipped: Sequence[Skipped] = ()
    """Samples that belong here but could not be read; they are not among those it holds."""
    is_placeholder: bool = False
    """Whether none could be read: it holds another sample, repeated, which counts for nothing."""

    @property
    def ids(self) -> Tensor:
        """Each sample's number in its data set, int64 [N]."""
        ids: Tensor = self["id"]
        return ids

    @property
    def size(self) -> int:
        """How many samples it holds."""
        return len(self["id"])

    @property
    def image_sizes(self) -> list[tuple[int, int]] | None:
        """Height and width of each image without its padding; None if no image is padded."""
        return [(height, width) for height, width in self[IMAGE_SIZE].tolist()] if IMAGE_SIZE in self else None

    def image(self, index: int) -> Tensor:
        """Image `index` without its padding."""
        return crop_padding(self["image"][index], self, index)

    def is_inside(self) -> Tensor | None:
        """Which pixels are no padding, bool [N, H, W] on the images' device; None if all are."""
        if IMAGE_SIZE not in self:
            return None
        images: Tensor = self["image"]
        return inside_sizes(self[IMAGE_SIZE], images.shape[-2:], images.device)

    def __missing__(self, name: str) -> Any:
        raise MissingFieldError(self.describe_missing(name))

    def describe_missing(self, name: str) -> str:
        """What is there instead of a field, and what the field would be."""
        found = ", ".join(
            f"{own!r} {describe_tensor(value)}" if isinstance(value, Tensor) else repr(own)
            for own, value in self.items()
        )
        form = f"; {_FORMS[name]}" if name in _FORMS else ""
        return f"the batch has no {name!r}, it has {found}{form}"

    @property
    def has_target(self) -> bool:
        """Whether there is something to compare outputs with; images to predict have nothing."""
        return any(name in self for name in TARGETS)

    @property
    def target(self) -> Any:
        """What outputs are compared with: the field "target", else "label", else "mask"."""
        for name in TARGETS:
            if name in self:
                return self[name]
        expected = f"expected one of {', '.join(TARGETS)}; have the data set return (image, target)"
        raise DataError(f"these samples have no field to compare outputs with: {expected}")

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`, but for `ON_HOST`."""
        return self._with(
            lambda tensor: tensor if tensor.device == device else tensor.to(device, non_blocking=True), ON_HOST
        )

    def pin_memory(self) -> Batch:
        """The same batch where a graphics card can copy it from while the host does something else."""
        return self._with(_pin)

    def _with(self, change: Callable[[Tensor], Tensor], unchanged: Sequence[str] = ()) -> Batch:
        batch = Batch(
            {name: value if name in unchanged else map_tensors(value, change) for name, value in self.items()}
        )
        if self.skipped:
            batch.skipped, batch.is_placeholder = self.skipped, self.is_placeholder
        return batch


def crop_padding(planes: Tensor, batch: Batch, index: int) -> Tensor:
    """Planes [..., H, W] of sample `index`, of the size of a batch's images or masks, without the padding."""
    if IMAGE_SIZE not in batch:
        return planes
    height, width = batch[IMAGE_SIZE][index].tolist()
    return planes[..., :height, :width]


def describe_tensor(tensor: Tensor) -> str:
    """The type and shape of a tensor, as in `float32 [8, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A field with its tensors changed, those in lists and dicts too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        return {name: map_tensors(item, change) for name, item in value.items()}
    return value


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor


class Collator:
    """Stacks samples whose images have the size and type of the first; each is copied to its place when it is added.

    With `padding`, images of other sizes are kept and padded with all others at the end. `model_pads` is False if the
    task would have them padded, and its model takes images of one size alone.
    """

    def __init__(self, room: int, padding: Padding | None = None, model_pads: bool = True) -> None:
        self._room, self._padding, self._model_pads = room, padding, model_pads
        self._others: list[Image] = []  # from the first of another size on
        self._ids: list[int] = []
        self._fields: dict[str, list[Any]] = {}
        self._images: Image = np.empty(0, np.uint8)
        self._shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, index: int, sample: Sample) -> None:
        """Copy sample `index` behind those that are here."""
        image = as_image(sample["image"])
        if not self._ids:
            self._shape = image.shape
            self._images = np.empty((self._room, *_channels_first(image.shape)), image.dtype)
            self._fields = {name: [] for name in sample}
            if IMAGE_SIZE in sample:
                raise DataError(f'samples have a field "{IMAGE_SIZE}", which padded batches have: give it another name')
        elif image.dtype != self._images.dtype:
            raise DataError(
                f"samples {self._ids[0]} and {index} differ in type ({self._images.dtype} and {image.dtype}), so they"
                " cannot be stacked; have the data set give all images as uint8, or all as float32"
            )
        elif image.shape[-1] != self._shape[-1]:
            raise DataError(
                f"samples {self._ids[0]} and {index} have {self._shape[-1]} and {image.shape[-1]} channels, so they"
                ' cannot be stacked; have the data set give all images alike, such as image.convert("RGB")'
            )
        elif image.shape != self._shape and (self._padding is None or image.ndim > 3):
            advice = f"{_ONE_SIZE}, {_PADDING_TASKS}" if self._model_pads else f"this model needs one size: {_ONE_SIZE}"
            raise DataError(
                f"samples {self._ids[0]} and {index} differ in size ({_size(self._shape)} and {_size(image.shape)}), so"
                f" they cannot be stacked; {advice}"
            )
        if self._others or image.shape != self._shape:
            self._others.append(image)
        else:
            _write(image, self._images[len(self._ids)])
        self._ids.append(index)
        for name, values in self._fields.items():
            if name != "image":
                values.append(sample[name])

    def batch(self) -> Batch:
        """The samples: images [N, C, H, W] or [N, C, T, H, W], numbers as int64 [N], arrays stacked, objects listed."""
        fields: dict[str, Any] = {"id": torch.tensor(self._ids)}
        padding = self._padding
        if padding and (self._others or (len(self._shape) == 3 and padding.is_needed(*self._shape[:2]))):
            stacked = self._images[: len(self._ids) - len(self._others)]
            fields["image"], fields[IMAGE_SIZE] = padding.stack_images(stacked, self._others)
        else:
            fields["image"] = torch.from_numpy(self._images[: len(self._ids)])
        for name, values in self._fields.items():
            if name == "mask" and padding and IMAGE_SIZE in fields:
                fields[name] = padding.stack_masks(values, fields["image"], fields[IMAGE_SIZE])
            elif name != "image":
                fields[name] = (
                    [_tensor(value) for value in values] if name in LIST_FIELDS else self._stacked(name, values)
                )
        return Batch(fields)

    def _stacked(self, name: str, values: list[Any]) -> Tensor:
        if isinstance(values[0], int):
            return torch.tensor(values)
        try:
            return torch.from_numpy(np.stack(values))
        except (ValueError, TypeError) as error:
            shapes = [list(np.shape(value)) for value in values]
            other = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), 0)
            raise DataError(
                f"samples {self._ids[0]} and {self._ids[other]} have {name} of shapes {shapes[0]} and {shapes[other]},"
                " which cannot be stacked; have the data set give numbers of one shape"
            ) from error


def collate(ids: Iterable[int], samples: Iterable[Sample], padding: Padding | None = None) -> Batch:
    """Samples as a batch: of one size or, with `padding`, of any."""
    numbered = list(zip(ids, samples, strict=True))
    together = Collator(len(numbered), padding)
    for index, sample in numbered:
        together.add(int(index), sample)
    return together.batch()


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[H, W, C] becomes [C, H, W], and [..., T, H, W, C] becomes [..., C, T, H, W]."""
    frame = min(len(shape) - 1, 3)
    return *shape[: -frame - 1], shape[-1], *shape[-frame - 1 : -1]


def _write(image: Image, place: Image) -> None:
    """Copy an image, or the frames of a video, to a place of the same type with the channels first."""
    if image.ndim > 4:
        for part, part_of_place in zip(image, place, strict=True):
            _write(part, part_of_place)
    elif place.shape[0] == 1:
        np.copyto(place[0], image[..., 0])
    else:  # several times as fast as turning the axes of whole batches
        width, channels = image.shape[-2:]
        planes = place.reshape(channels, -1, width)
        cv2.split(image.reshape(-1, width, channels), list(planes))  # of other types it would write elsewhere


def _tensor(value: NDArray[Any]) -> Tensor:
    # Of its own, contiguous and writable: what a data set keeps in memory must not be shared with a model.
    return torch.from_numpy(np.array(value))


def _size(shape: tuple[int, ...]) -> str:
    height, width = shape[-3:-1]
    frames = f"{shape[-4]} × " if len(shape) > 3 else ""
    return f"{frames}{width}×{height}"


def as_arrays(sample: Any) -> Sample:
    """The sample with arrays of these types; an image that is still encoded stays so.

    Anything that cannot be an image is a DataError that says what was found.
    """
    if not isinstance(sample, dict) or "image" not in sample:
        found = f"the fields {', '.join(map(str, sample))}" if isinstance(sample, dict) else type(sample).__name__
        raise DataError(f'expected a dict with "image" in it, found {found}')
    changed = {name: new for name, value in sample.items() if (new := _as_array(value)) is not value}
    image = changed.get("image", sample["image"])
    if isinstance(image, np.ndarray):
        image = as_image(image)
    elif not hasattr(image, "decode"):
        raise DataError(f"the image is a {type(image).__name__}, expected a NumPy array or a torch tensor")
    return {**sample, **changed, "image": image} if changed or image is not sample["image"] else sample


def as_image(image: NDArray[Any]) -> Image:
    """An image [H, W, C], or frames of one, in a type that everything behind can work with."""
    if image.ndim < 3:
        raise DataError(f"the image has the shape {list(image.shape)}, expected [height, width, channels]")
    if image.dtype in (_PIXELS, _FLOATS):
        return image
    if image.dtype.kind == "f":
        return image.astype(np.float32)
    raise DataError(_refusal(image.dtype.name))


def as_images(images: Tensor, float_type: torch.dtype = torch.float32) -> Tensor:
    """The same of images of whole batches, [N, C, H, W] or more."""
    if images.dtype == torch.uint8:
        return images
    if images.is_floating_point():
        return images.to(float_type)
    raise DataError(_refusal(str(images.dtype).removeprefix("torch.")))


def _refusal(found: str) -> str:
    return f"the image is of {found}; {_EXPECTED}; convert it in the data set, as with image.astype(np.float32)"


def _as_array(value: Any) -> Any:
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        host = host.float() if host.dtype == torch.bfloat16 else host
        return host.item() if host.ndim == 0 and not host.is_floating_point() else host.numpy()
    return int(value) if isinstance(value, np.integer) else value
