"""A user's module: small data, small nets, and some that misbehave at a known moment."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import paceline
from paceline.data.datasets.idx import MemoryImages, fashion_small

MARKED = 7  # the number of the sample that `fragile` cannot bear


@paceline.register.model("flat")
def flat(num_classes: int, in_channels: int, width: int = 8) -> nn.Sequential:
    """No convolutions, which float16 makes very slow on a CPU."""
    layers = [
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * in_channels, width, bias=False),
        nn.BatchNorm1d(width),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, num_classes))


@paceline.register.model("normless")
def normless(num_classes: int, in_channels: int) -> nn.Sequential:
    """No BatchNorm."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * in_channels, num_classes))


class Centerd(nn.Module):
    """Has a float32 buffer of its own between layers, which makes what comes out of the first float32."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16 * in_channels, 8), nn.Linear(8, num_classes)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        pooled = nn.functional.adaptive_avg_pool2d(images, 4).flatten(1)
        logits: Tensor = self.second(self.first(pooled) - self.center)
        return logits


class Growing(nn.Module):
    """Adds a parameter to itself in its third pass of training."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.body = normless(num_classes, in_channels)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        """Logits, with an offset as soon as it is there."""
        self.passes += self.training
        if self.passes == 3 and self.training:
            self.offset = nn.Parameter(torch.zeros(1))
        logits: Tensor = self.body(images)
        return logits + self.offset if hasattr(self, "offset") else logits


class Fragile(nn.Module):
    """Gradients overflow in whichever process computes an image of one color; losses stay what they are."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.body = flat(num_classes, in_channels)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.body(images)
        if self.training and bool((images.flatten(1).amax(1) == images.flatten(1).amin(1)).any()):
            logits.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        return logits


paceline.register.model("centerd")(Centerd)
paceline.register.model("growing")(Growing)
paceline.register.model("fragile")(Fragile)


class Pausing(MemoryImages):
    """At the read of number PAUSE_AT a process writes its id into `paused-RANK` and waits for a signal or `go`."""

    asked = 0

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        self.asked += 1
        if self.asked == int(os.environ.get("PAUSE_AT", "0")):
            rank = os.environ["RANK"]
            Path(f"pausing-{rank}").write_text(str(os.getpid()))
            Path(f"pausing-{rank}").replace(f"paused-{rank}")
            _wait_for_signal_or(Path("go"))
        return super().gather(ids)


def _wait_for_signal_or(file: Path) -> None:
    awakened, tell = os.pipe()
    os.set_blocking(tell, False)
    before = signal.set_wakeup_fd(tell)
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline and not select.select([awakened], [], [], 0.01)[0]:
        pass
    signal.set_wakeup_fd(before)


@paceline.register.dataset("few")
def few(split: Literal["train", "test"], count: int = 200, pausing: bool = False, marked: bool = False) -> MemoryImages:
    """The first images of the embedded data set; one of them is without contrast if wanted."""
    base = fashion_small(split)
    images = base.images[:count].clone()
    if marked:
        images[MARKED] = 100
    return (Pausing if pausing else MemoryImages)(images, {"label": base.fields["label"][:count]}, base.classes)
