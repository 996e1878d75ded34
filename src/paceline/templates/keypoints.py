"""Your model, data set, loss and metric of keypoints (pose). Edit what is marked with ←."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import register


@register.model("my_model")
class MyModel(nn.Module):  # ← your model
    """Heatmaps [N, num_keypoints, h, w] of images [N, in_channels, H, W] of one person each."""

    def __init__(self, num_keypoints: int, in_channels: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 5, stride=2, padding=2),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 5, padding=2),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, num_keypoints, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """The heatmaps; each keypoint is where its heatmap is highest."""
        heatmaps: Tensor = self.layers(images)
        return heatmaps


@register.layer_map("my_layers")
def my_layers(model: nn.Module) -> Callable[[str], int]:  # ← your layer ids
    """From a parameter's name to its layer, 0 at the input: finetune.yaml lowers their learning rates by it."""
    return lambda name: int(name.split(".")[1]) // 3  # a convolution, its norm and its activation are one layer


@register.dataset("my_dataset")
class MyDataset(Dataset[tuple[Image.Image, dict[str, Tensor]]]):  # ← your data set
    """The people of root/SPLIT.json, which is COCO's format; each is cut out of its image."""

    def __init__(self, root: Path, split: str) -> None:
        content = json.loads((root / f"{split}.json").read_text(encoding="utf-8"))
        names = {image["id"]: image["file_name"] for image in content["images"]}
        self.keypoint_names = content["categories"][0]["keypoints"]  # left_… and right_… change places in a flip
        self.people = [(root / "images" / names[each["image_id"]], each) for each in content["annotations"]]

    def __len__(self) -> int:
        return len(self.people)

    def __getitem__(self, index: int) -> tuple[Image.Image, dict[str, Any]]:
        """The image, and keypoints [J, 3]: x, y, and 0 not labeled, 1 hidden or 2 visible."""
        file, person = self.people[index]
        left, top, width, height = person["bbox"]
        keypoints = torch.tensor(person["keypoints"]).view(-1, 3) - torch.tensor([left, top, 0])
        return Image.open(file).crop((left, top, left + width, top + height)), {"keypoints": keypoints}


@register.loss("my_loss")
def my_loss(output: Tensor, target: Tensor, sigma: float = 1.0) -> Tensor:  # ← your loss
    """One number, from heatmaps [N, J, h, w] and keypoints [N, J, 3], x and y in pixels of the heatmap."""
    height, width = output.shape[-2:]
    across = torch.arange(width, device=output.device) + 0.5 - target[..., :1]  # [N, J, w]
    down = torch.arange(height, device=output.device) + 0.5 - target[..., 1:2]
    peaks = (-(down[..., None] ** 2 + across[..., None, :] ** 2) / (2 * sigma**2)).exp()
    is_labeled = (target[..., 2] > 0).float()
    errors = (output - peaks).square().mean((2, 3)) * is_labeled
    return (errors.sum(1) / is_labeled.sum(1).clamp(min=1)).mean()


@register.metric("my_metric")
class MyMetric:  # ← your metric
    """How far off labeled keypoints are, in pixels of the image, on average."""

    higher_is_better = False
    sums = ("distance", "count")  # what `update` adds up; these start at 0

    def __init__(self) -> None:
        self.distance, self.count = 0.0, 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: preds [N, J, 2], target [N, J, 3], in pixels of the image as the data set gave it."""
        is_labeled = target[..., 2] > 0
        self.distance += float((preds - target[..., :2])[is_labeled].norm(dim=1).sum())
        self.count += int(is_labeled.sum())

    def compute(self) -> float:
        """The value over all that was added."""
        return self.distance / self.count
