"""Small nets and plain steps, for the tests of precisions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.engine.loss_accumulator import WeightedLoss
from paceline.engine.precision.mixed import Precision, make_precision
from paceline.optim.clipping import NoClip

CPU = torch.device("cpu")
NUM_CLASSES = 3
NAMES = ["fp32", "tf32", "bf16", "fp16", "O0", "O1", "O2", "O3"]


class Trial:
    """A model under some precision, as a run has it: an optimizer over its weights, steps, a loss."""

    def __init__(self, precision: str | Precision, model: nn.Module, lr: float = 0.1) -> None:
        self.precision = make_precision(precision, CPU) if isinstance(precision, str) else precision
        self.model = model
        self.optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.trainable: list[nn.Parameter] = self.optimizer.param_groups[0]["params"]
        self.weights = self.precision.attach(model)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The sum over samples."""
        with self.precision.compute():
            return F.cross_entropy(self.model(images).float(), labels, reduction="sum")

    def gradients(self, images: Tensor, labels: Tensor, micro_batches: int = 1) -> Tensor:
        """Put the gradient of the mean loss on the optimizer's parameters; the result is its norm."""
        parts = zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True)
        for part_images, part_labels in parts:
            self.precision.backward([WeightedLoss(self.loss(part_images, part_labels), 1 / len(labels))])
        self.precision.unscale(self.trainable)
        return NoClip()(self.trainable)

    def update(self, images: Tensor, labels: Tensor, micro_batches: int = 1) -> bool:
        """One update; whether it was done."""
        skipped = self.precision.update_loss_scale(self.gradients(images, labels, micro_batches))
        if not skipped:
            self.optimizer.step()
            self.precision.sync_weights()
        for parameter in self.trainable:
            parameter.grad = None
        return not skipped


def small_net() -> nn.Module:
    """Convolution, BatchNorm, GroupNorm and a classifier, always with the same weights."""
    torch.manual_seed(3)
    first = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, NUM_CLASSES))


def samples(size: int = 24, side: int = 6, channels: int = 2) -> tuple[Tensor, Tensor]:
    """Noise with labels that a net can learn something about."""
    generator = torch.Generator().manual_seed(size)
    labels = torch.randint(0, NUM_CLASSES, (size,), generator=generator)
    images = torch.randn(size, channels, side, side, generator=generator)
    images[:, 0] += labels.view(-1, 1, 1) * 0.7
    return images, labels


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Their gradients, which they have to have."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(found) == len(parameters)
    return found
