"""A data set with every field that samples may have, for packs."""

from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np

from paceline.core.errors import DataError
from paceline.data.batch import KeypointNames, Sample


@dataclass
class Scenes:
    """Images made of 2×2 blocks with everything in them that can be; `bad` ones cannot be read."""

    size: int = 5
    even: bool = False
    bad: frozenset[int] = frozenset()
    pause: float = 0.0
    with_objects: bool = True
    classes: list[str] = field(default_factory=lambda: ["ground", "Käfer"])
    channels: int = 3
    joints: KeypointNames = field(default_factory=lambda: KeypointNames(["left", "right"], [(0, 1)], [(0, 1)]))

    def __len__(self) -> int:
        return self.size

    def path(self, index: int) -> Path:
        return Path(f"scenes/{index}.jpg")

    def read(self, index: int) -> Sample:
        sleep(self.pause)
        if index in self.bad:
            raise DataError(f"scenes/{index}.jpg: damaged or truncated image (it is bad)")
        height, width = (40, 60) if self.even else (40 + 4 * index, 60 + 2 * index)
        random = np.random.default_rng(index)
        blocks = random.integers(0, 256, (height // 2, width // 2, 3), dtype=np.uint8)
        sample: dict[str, Any] = {
            "image": blocks.repeat(2, 0).repeat(2, 1),
            "label": index % 2,
            "mask": (blocks[..., 0] // 64).repeat(2, 0).repeat(2, 1),
            "size": np.array([height, width]),
            "image_id": 1000 + index,
            "weight": index / 3,
        }
        return sample | (objects(index, height, width) if self.with_objects else {})


def objects(count: int, height: int, width: int) -> Sample:
    """So many objects; the first one is a rectangle."""
    masks = np.zeros((count, height, width), np.uint8)
    masks[:, 4:12, 8:20] = 1
    return {
        "boxes": np.tile(np.array([8, 4, 20, 12], np.float32), (count, 1)),
        "classes": np.arange(count),
        "masks": masks,
        "keypoints": np.tile(np.array([[10, 6, 2], [0, 0, 0]], np.float32), (count, 1, 1)),
        "crowd": np.arange(count) % 2 == 1,
        "area": np.full(count, 96, np.float32),
    }
