"""Your model, data set, loss and metric of an image classifier. Edit what is marked with ←."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline import register


@register.model("my_model")
class MyModel(nn.Module):  # ← your model
    """Logits [N, num_classes] of images [N, in_channels, H, W]."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """The logits; losses and metrics are given them as `output` and `preds`."""
        logits: Tensor = self.layers(images)
        return logits


@register.layer_map("my_layers")
def my_layers(model: nn.Module) -> Callable[[str], int]:  # ← your layer ids
    """From a parameter's name to its layer, 0 at the input: finetune.yaml lowers their learning rates by it."""
    return lambda name: int(name.split(".")[1]) // 3  # a convolution, its norm and its activation are one layer


@register.dataset("my_dataset")
class MyDataset(Dataset[tuple[Image.Image, int]]):  # ← your data set
    """The images root/CLASS/*, each with the number of its class; every fourth is for val."""

    def __init__(self, root: Path, split: str) -> None:
        self.classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        files = [file for file in sorted(root.glob("*/*")) if file.suffix.lower() in (".jpg", ".jpeg", ".png")]
        self.files = [file for index, file in enumerate(files) if (index % 4 == 3) == (split == "val")]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        file = self.files[index]
        return Image.open(file), self.classes.index(file.parent.name)


@register.loss("my_loss")
def my_loss(output: Tensor, target: Tensor, label_smoothing: float = 0.1) -> Tensor:  # ← your loss
    """One number, from output [N, num_classes] and target [N]: the mean over the samples."""
    return F.cross_entropy(output, target, label_smoothing=label_smoothing)


@register.metric("my_metric")
class MyMetric:  # ← your metric
    """The share of samples whose class is right."""

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
