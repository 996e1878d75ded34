"""The training that every contestant of the step benchmark does, and what they share to do it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset

from benchmarks.nets import Mlp, SmallConvNet, SmallMlp
from paceline.data.datasets.idx import fashion_small

MEAN, STD = 0.286, 0.353
LR, WEIGHT_DECAY = 1e-3, 0.01
Pair = tuple[Tensor, Tensor]

_MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "benchmark_small_mlp": SmallMlp,
    "benchmark_mlp": Mlp,
    "benchmark_convnet": SmallConvNet,
}


@dataclass(frozen=True)
class Contest:
    """So many steps of one network on the embedded data set, which lies in memory; `folder` is for what is written."""

    model: str
    batch: int
    steps: int
    folder: Path

    def make_model(self) -> nn.Module:
        """The network, ready to train."""
        torch.manual_seed(0)
        return _MODELS[self.model](10, 1).train()

    def lr(self, step: int) -> float:
        """Half a cosine."""
        return LR * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The fastest AdamW that torch has for this device, as Paceline chooses it."""
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def normalize(images: Tensor) -> Tensor:
    """The pixels as the network wants them, in the fewest passes."""
    return images.float().mul_(1 / (255 * STD)).add_(-MEAN / STD)


class Batches(BatchSampler):
    """Sample numbers of whole batches, shuffled again in each epoch; the last, smaller one is left out."""

    def __init__(self, contest: Contest, size: int) -> None:
        super().__init__(range(size), contest.batch, drop_last=True)
        self.contest, self.size = contest, size

    def __len__(self) -> int:
        return self.contest.steps

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        batch, left = self.contest.batch, self.contest.steps
        per_epoch = self.size // batch
        while left:
            order = torch.randperm(self.size)
            for start in range(0, min(per_epoch, left) * batch, batch):
                yield order[start : start + batch]
            left -= min(per_epoch, left)


class Samples(Dataset[Pair]):
    """The data set, from which torch's loader takes whole batches at once."""

    def __init__(self) -> None:
        data = fashion_small("train")
        self.images, self.labels = data.images, data.fields["label"]

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, ids: Tensor) -> Pair:
        return self.images.index_select(0, ids), self.labels.index_select(0, ids)


def make_batches(contest: Contest) -> Iterator[Pair]:
    """All batches, without a loader."""
    samples = Samples()
    return map(samples.__getitems__, Batches(contest, len(samples)))


def make_loader(contest: Contest, collate: Callable[[Any], Any] = lambda pair: pair) -> DataLoader[Any]:
    """The same batches through torch's loader, which the frameworks expect."""
    samples = Samples()
    return DataLoader(samples, batch_sampler=Batches(contest, len(samples)), collate_fn=collate)
