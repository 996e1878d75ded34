"""The two things that data is handed around as: a sample and a batch of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.skip_list import Skipped

Sample = dict[str, Any]
"""One example as a data set reads it: "image" as uint8 [H, W, C], or [T, H, W, C] of a video, and what the task needs.

Images may also be of floats, which models get as they are; tensors are as good as arrays (`sample_types`).

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
TRUTHS = {"mask": "truth"} | {name: f"truth_{name}" for name in ("boxes", "classes", "crowd", "area")}
"""Under which names masks and objects are kept as they were read, where predictions are measured on those."""
LISTED = RAGGED | frozenset(TRUTHS.values())
"""All fields that a batch holds as a list: those of objects, and masks of the sizes in which they were read."""

TARGETS = ("target", "label", "mask")
"""Fields that a loss or a metric of a user's may be given as its target, the first that is there."""


class KeypointNames(NamedTuple):
    """What keypoints are called, which of them are left and right of a kind, and which to join by a line."""

    names: list[str]
    pairs: list[tuple[int, int]]
    limbs: list[tuple[int, int]]


class Batch(dict[str, Any]):
    """Samples stacked by field: "id" [N] always, "image" [N, C, H, W], and what the task needs ("label", ...).

    Images of a video are [N, C, T, H, W]; fields of objects (`RAGGED`) are lists of N tensors.
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
    def target(self) -> Any:
        """What outputs are compared with: the field "target", else "label", else "mask"."""
        for name in TARGETS:
            if name in self:
                return self[name]
        raise DataError(f"these samples have no field to compare outputs with: expected one of {', '.join(TARGETS)}")

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        return self._with({name: _move(value, device) for name, value in self.items()})

    def pin_memory(self) -> Batch:
        """The same batch where a graphics card can copy it from while the host does something else."""
        return self._with({name: _pin(value) for name, value in self.items()})

    def _with(self, fields: dict[str, Any]) -> Batch:
        batch = Batch(fields)
        if self.skipped:
            batch.skipped, batch.is_placeholder = self.skipped, self.is_placeholder
        return batch


def _pin(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.pin_memory() if value.device.type == "cpu" and not value.is_pinned() else value
    if isinstance(value, list):
        return [_pin(item) for item in value]
    return value


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [_move(item, device) for item in value]
    if isinstance(value, dict):
        return {name: _move(item, device) for name, item in value.items()}
    return value
