"""Your model, data set, loss and metric of a video classifier. Edit what is marked with ←."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline import register


@register.model("my_model")
class MyModel(nn.Module):  # ← your model
    """Logits [N, num_classes] of clips [N, in_channels, T, H, W]."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(in_channels, width, 3, stride=(1, 4, 4), padding=1),
            nn.BatchNorm3d(width),
            nn.ReLU(),
            nn.Conv3d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm3d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(2 * width, num_classes),
        )

    def forward(self, clips: Tensor) -> Tensor:
        """The logits; losses and metrics are given them as `output` and `preds`."""
        logits: Tensor = self.layers(clips)
        return logits


@register.layer_map("my_layers")
def my_layers(model: nn.Module) -> Callable[[str], int]:  # ← your layer ids
    """From a parameter's name to its layer, 0 at the input: finetune.yaml lowers their learning rates by it."""
    return lambda name: int(name.split(".")[1]) // 3  # a convolution, its norm and its activation are one layer


@register.dataset("my_dataset")
class MyDataset(Dataset[tuple[Tensor, int]]):  # ← your data set
    """The videos root/videos/CLASS/*, each with the number of its class; every fourth is for val."""

    def __init__(self, root: Path, split: str) -> None:
        self.classes = sorted(folder.name for folder in (root / "videos").iterdir() if folder.is_dir())
        files = sorted((root / "videos").glob("*/*.mp4"))
        self.files = [file for index, file in enumerate(files) if (index % 4 == 3) == (split == "val")]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """All frames, uint8 [T, C, H, W], of which `clip` in the recipe chooses some, and the class."""
        file = self.files[index]
        with av.open(str(file)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2), self.classes.index(file.parent.name)


@register.loss("my_loss")
def my_loss(output: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:  # ← your loss
    """One number, from output [N, num_classes] and target [N]: the mean over the samples."""
    return F.cross_entropy(output, target, label_smoothing=label_smoothing)


@register.metric("my_metric")
class MyMetric:  # ← your metric
    """The share of videos whose class is right."""

    higher_is_better = True
    sums = ("correct", "count")  # what `update` adds up; these start at 0

    def __init__(self) -> None:
        self.correct, self.count = 0, 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: preds [N, num_classes], target [N]."""
        self.correct += int((preds.argmax(1) == target).sum())
        self.count += len(target)

    def compute(self) -> float:
        """The value over all that was added."""
        return self.correct / self.count
