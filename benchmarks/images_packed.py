"""Photos loaded by Paceline from a pack: resized once, decoded never again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.photos import MEAN, SIZE, STD
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.loader import Request, load
from paceline.data.pack import PackedSamples, write_pack
from paceline.data.sampler import Permutation
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.geometric import RandomHorizontalFlip, RandomResizedCrop

SHORTER_SIDE = 256
THREADS = 2


def epochs(root: Path, batch: int) -> Callable[[], Iterator[Tensor]]:
    """What gives, each time it is called, the batches of one more epoch, ready for a model; the pack is made first."""
    written = write_pack(ImageFolder(root), root.with_name(f"{root.name}.pack"), SHORTER_SIDE)
    source = SplitLoader(
        PackedSamples(written.path), [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)], seed=0
    )
    written.path.unlink()  # it stays mapped
    order, numbers, device = Permutation(written.samples, seed=0), count(), torch.device("cpu")

    def epoch() -> Iterator[Tensor]:
        number = next(numbers)
        for loaded in load(source, _requests(order, number, batch), THREADS, "thread"):
            yield source.transform_batch(loaded, number, device)["image"]

    return epoch


def _requests(order: Permutation, epoch: int, batch: int) -> Iterator[Request]:
    for start in range(0, order.size, batch):
        yield Request(epoch, order.at(epoch, start, min(start + batch, order.size)))
