"""Your model, data set, losses and metric of object detection. Edit what is marked with ←."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline import register
from paceline.models.detector import Detections, LossParts, Target, select_detections


@register.model("my_model")
class MyModel(nn.Module):  # ← your model
    """A class and a box for each cell of 8 × 8 pixels. A detector brings its losses, so the recipe lists none."""

    loss_names = ("class_loss", "box_loss")
    stride = 8

    def __init__(self, num_classes: int, in_channels: int, width: int = 16) -> None:
        super().__init__()
        self.num_classes = num_classes
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
            nn.Conv2d(4 * width, num_classes + 4, 3, padding=1),
        )

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> LossParts | list[Detections]:
        """With targets, each loss as a sum and what to divide it by; without, what is detected in each image."""
        if targets is None:
            found = zip(*self.candidates(images), strict=True)
            return [
                select_detections(*each, score_thresh=0.05, nms_thresh=0.5, detections_per_img=20) for each in found
            ]
        centers, boxes, logits = self.cells(images)
        labels, wanted = assign(centers, targets, self.num_classes)
        is_object = labels < self.num_classes  # [N, P]
        one_hot = F.one_hot(labels, self.num_classes + 1)[..., :-1].to(logits)
        count = is_object.sum().clamp(min=1)
        box_sum = (box_loss(boxes, wanted) * is_object).sum()
        return {"class_loss": (class_loss(logits, one_hot), count), "box_loss": (box_sum, count)}

    def candidates(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """All boxes [N, P, 4] and their scores [N, P, num_classes], which exported graphs give."""
        _, boxes, logits = self.cells(images)
        return boxes, logits.sigmoid()

    def cells(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The centers of the cells [P, 2], and of each cell its box [N, P, 4] and logits [N, P, num_classes]."""
        maps = self.layers(images)
        height, width = maps.shape[-2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centers = (torch.stack([columns, rows], -1).view(-1, 2).to(maps) + 0.5) * self.stride  # [P, 2] as x, y
        cells = maps.flatten(2).transpose(1, 2)  # [N, P, num_classes + 4]
        logits, sides = cells[..., : self.num_classes], F.softplus(cells[..., self.num_classes :]) * self.stride
        boxes = torch.cat([centers - sides[..., :2], centers + sides[..., 2:]], -1)  # [N, P, 4] as x1 y1 x2 y2
        return centers, boxes, logits


def class_loss(output: Tensor, target: Tensor) -> Tensor:  # ← your loss of classes
    """The sum of the focal loss over logits [N, P, num_classes]; targets are 0 and 1."""
    losses = F.binary_cross_entropy_with_logits(output, target, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum()


def box_loss(output: Tensor, target: Tensor) -> Tensor:  # ← your loss of boxes
    """1 − IoU of each box [N, P, 4] and the object at its place."""
    return 1 - overlap(output, target)


def assign(centers: Tensor, targets: Sequence[Target], num_classes: int) -> tuple[Tensor, Tensor]:
    """The class of each cell, `num_classes` for none, and its box: of the smallest object that holds its center."""
    labels, boxes = [], []
    for target in targets:
        nothing = centers.new_tensor([[-1e9, -1e9, 1e9, 1e9]])  # holds every center, and is larger than any object
        own = torch.cat([target["boxes"].to(centers), nothing])  # [K + 1, 4]
        holds = ((centers[:, None] > own[:, :2]) & (centers[:, None] < own[:, 2:])).all(2)  # [P, K + 1]
        areas = (own[:, 2:] - own[:, :2]).prod(1)
        smallest = areas.where(holds, torch.inf).argmin(1)
        labels.append(F.pad(target["labels"], (0, 1), value=num_classes)[smallest])
        boxes.append(own[smallest])
    return torch.stack(labels), torch.stack(boxes)


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """The IoU of boxes [..., 4] as x1 y1 x2 y2."""
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    areas = [(boxes[..., 2:] - boxes[..., :2]).prod(-1) for boxes in (first, second)]
    inside = (high - low).clamp(min=0).prod(-1)
    return inside / (areas[0] + areas[1] - inside)


@register.layer_map("my_layers")
def my_layers(model: nn.Module) -> Callable[[str], int]:  # ← your layer ids
    """From a parameter's name to its layer, 0 at the input: finetune.yaml lowers their learning rates by it."""
    return lambda name: int(name.split(".")[1]) // 3  # a convolution, its norm and its activation are one layer


@register.dataset("my_dataset")
class MyDataset(Dataset[tuple[Image.Image, dict[str, Tensor]]]):  # ← your data set
    """The images of root/SPLIT.json, which is COCO's format, with the boxes of their objects."""

    def __init__(self, root: Path, split: str) -> None:
        content = json.loads((root / f"{split}.json").read_text(encoding="utf-8"))
        self.classes = [category["name"] for category in content["categories"]]
        self.numbers = {category["id"]: number for number, category in enumerate(content["categories"])}
        self.files = [(root / "images" / image["file_name"], image["id"]) for image in content["images"]]
        self.objects: dict[int, list[dict[str, Any]]] = {number: [] for _, number in self.files}
        for each in content["annotations"]:
            self.objects[each["image_id"]].append(each)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, dict[str, Tensor]]:
        """The image; boxes [K, 4] as x1 y1 x2 y2 in its pixels, and labels [K] from 0."""
        file, number = self.files[index]
        extents = torch.tensor([each["bbox"] for each in self.objects[number]]).view(-1, 4)  # x, y, width, height
        labels = [self.numbers[each["category_id"]] for each in self.objects[number]]
        boxes = torch.cat([extents[:, :2], extents[:, :2] + extents[:, 2:]], 1)
        return Image.open(file), {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64)}


@register.metric("my_metric")
class MyMetric:  # ← your metric
    """The share of objects that a detection of their class with a score above 0.3 overlaps by half (IoU)."""

    higher_is_better = True
    sums = ("found", "count")  # what `update` adds up; these start at 0

    def __init__(self) -> None:
        self.found, self.count = 0, 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add an image: detections [1, K, 6] as x1 y1 x2 y2 score label, objects [1, M, 5] as x1 y1 x2 y2 label."""
        objects = target[0]
        certain = preds[0][preds[0, :, 4] > 0.3]
        is_class = objects[:, None, 4] == certain[None, :, 5]  # [M, K]
        is_place = overlap(objects[:, None, :4], certain[None, :, :4]) > 0.5
        self.found += int((is_class & is_place).any(1).sum())
        self.count += len(objects)

    def compute(self) -> float:
        """The value over all that was added."""
        return self.found / max(self.count, 1)
