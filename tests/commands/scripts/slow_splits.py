"""A user's module: splits that wait for the file `go` when they are read, and a metric that fails in one process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

import paceline
from paceline.data.batch import Batch
from paceline.data.datasets.idx import MemoryImages, fashion_small


class Waiting(MemoryImages):
    """Says by a file of its name that it is read for the first time, and answers when it may."""

    name = ""

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        if self.name == os.environ.get("WAIT_IN") and not Path(self.name).exists():
            Path(self.name).touch()
            while not Path("go").exists():
                time.sleep(0.01)
        return super().gather(ids)


@paceline.register.dataset("waiting")
def waiting(split: Literal["train", "test"], name: str) -> Waiting:
    """The first 100 images."""
    base = fashion_small(split)
    made = Waiting(base.images[:100], {"label": base.fields["label"][:100]}, base.classes)
    made.name = name
    return made


class Moody:
    """Measures nothing, and not even that in the process of rank FAIL_RANK."""

    def update(self, predictions: Any, batch: Batch) -> dict[str, Tensor]:
        if os.environ.get("FAIL_RANK") == os.environ.get("RANK", "0"):
            raise ZeroDivisionError("not today")
        return {}

    def compute(self, state: dict[str, Tensor]) -> dict[str, float]:
        return {}


paceline.register.metric("moody")(Moody)
