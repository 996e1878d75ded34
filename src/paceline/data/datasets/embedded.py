"""The small data set that comes with the package, so that a first run needs no download."""

from __future__ import annotations

from pathlib import Path

from paceline.data.datasets.idx import Split, idx
from paceline.data.datasets.memory import MemoryImages

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_FASHION = Path(__file__).parent.parent / "embedded" / "fashion"


def fashion_small(split: Split) -> MemoryImages:
    """A class-balanced part of Fashion-MNIST: 6,000 grey 28×28 images to train on and 2,000 to test on."""
    return idx(_FASHION, split, FASHION_CLASSES)
