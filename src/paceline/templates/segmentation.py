"""Your model, data set, loss and metric of semantic segmentation. Edit what is marked with ←."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline import register


@register.model("my_model")
class MyModel(nn.Module):  # ← your model
    """Logits [N, num_classes, h, w] of images [N, in_channels, H, W]; they are resized to the masks."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, num_classes, 3, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """The logits, of which losses are given `output` at the size of the masks."""
        logits: Tensor = self.layers(images)
        return logits


@register.layer_map("my_layers")
def my_layers(model: nn.Module) -> Callable[[str], int]:  # ← your layer ids
    """From a parameter's name to its layer, 0 at the input: finetune.yaml lowers their learning rates by it."""
    return lambda name: int(name.split(".")[1]) // 3  # a convolution, its norm and its activation are one layer


@register.dataset("my_dataset")
class MyDataset(Dataset[tuple[Image.Image, Tensor]]):  # ← your data set
    """The images root/images/*.jpg with the masks root/masks/*.png, whose pixels are class numbers."""

    classes = ("background", "disc", "square", "triangle")
    ignore_index = 255  # pixels that belong to no class

    def __init__(self, root: Path, split: str) -> None:
        names = (root / f"{split}.txt").read_text(encoding="utf-8").split()
        self.files = [(root / f"images/{name}.jpg", root / f"masks/{name}.png") for name in names]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, Tensor]:
        """The image, and its mask [H, W]."""
        image, mask = self.files[index]
        return Image.open(image), torch.from_numpy(np.array(Image.open(mask)))


@register.loss("my_loss")
def my_loss(output: Tensor, target: Tensor) -> Tensor:  # ← your loss
    """One number, from output [N, num_classes, H, W] and target [N, H, W]."""
    return F.cross_entropy(output, target, ignore_index=255)


@register.metric("my_metric")
class MyMetric:  # ← your metric
    """The share of labeled pixels whose class is right."""

    higher_is_better = True
    sums = ("correct", "count")  # what `update` adds up; these start at 0

    def __init__(self) -> None:
        self.correct, self.count = 0, 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add an image: the predicted classes [1, H, W] and the mask [1, H, W], at the image's original size."""
        is_labeled = target != 255
        self.correct += int((preds == target)[is_labeled].sum())
        self.count += int(is_labeled.sum())

    def compute(self) -> float:
        """The value over all that was added."""
        return self.correct / self.count
