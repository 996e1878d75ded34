"""A user's module with data sets that wait at a given moment until a signal or a file comes.

PAUSE_AT is the number of the read, counted from 1, at which the process writes the file `paused` and waits for the
file `go`. A pause beyond the reads of a run never comes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

from torch import Tensor

import paceline
from paceline.data.batch import Sample
from paceline.data.datasets.idx import MemoryImages, fashion_small

Split = Literal["train", "test"]


class Pausing(MemoryImages):
    """Images in memory; one of the times that they are asked for they keep the caller waiting."""

    asked = 0

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        self.asked += 1
        if self.asked == int(os.environ.get("PAUSE_AT", "0")):
            Path("paused").touch()
            deadline = time.monotonic() + 60
            while not Path("go").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return super().gather(ids)


@paceline.register.dataset("pausing")
def pausing(split: Split) -> Pausing:
    """The first 600 images of the embedded data set, with a pause."""
    base = fashion_small(split)
    return Pausing(base.images[:600], {"label": base.fields["label"][:600]}, base.classes)


@paceline.register.dataset("few")
def few(split: Split) -> MemoryImages:
    """The first 300 images of the embedded data set."""
    base = fashion_small(split)
    return MemoryImages(base.images[:300], {"label": base.fields["label"][:300]}, base.classes)


class OneByOne:
    """The embedded data set read sample by sample, as files are, so that workers read it."""

    def __init__(self, split: Split) -> None:
        self.base = fashion_small(split)
        self.classes, self.channels = self.base.classes, self.base.channels

    def __len__(self) -> int:
        return len(self.base)

    def read(self, index: int) -> Sample:
        return self.base.read(index)


paceline.register.dataset("one_by_one")(OneByOne)
