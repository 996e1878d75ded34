"""FCOS: a single-stage, anchor-free detector on any image backbone of timm or torchvision.

Each cell of a feature map predicts class logits, the distances from its center to the four edges of a box, and its
centerness (Tian et al., "FCOS: Fully Convolutional One-Stage Object Detection", 2019). With a small backbone it trains
on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count, Positive, Share
from paceline.core.registry import register
from paceline.core.world import constant, to_float64
from paceline.models.detector import (
    ABSENT,
    Detections,
    ImageSizes,
    LossParts,
    Target,
    cells_inside,
    select_detections,
)
from paceline.models.encoder_decoder import FPNLevel, build_encoder
from paceline.models.zoo import BackboneName, LibraryArgs

_ALPHA, _GAMMA = 0.25, 2.0  # of the focal loss
_PRIOR = 0.01  # the probability that an untrained head gives every class
_GROUPS = 8
_LEVEL_SCALE = 4.0  # a level is for boxes that reach 4 to 8 strides from the cell, as published


class Cells(NamedTuple):
    """The cells of all levels, finest first, one after the other."""

    centers: Tensor
    """[P, 2] as x and y, in pixels of the image."""
    strides: Tensor
    """[P]"""
    reach: Tensor
    """[P, 2], the shortest and longest distance to an edge of the boxes that a cell is for."""


class Assignment(NamedTuple):
    """What the cells of one image are to predict."""

    classes: Tensor
    """int64 [P], the class of each cell; -1 for the background."""
    distances: Tensor
    """[P, 4], to the left, upper, right and lower edge; of background cells they mean nothing."""
    centerness: Tensor
    """[P], 1 in the middle of a box and 0 at its edges."""


@register.model("fcos")
class FCOS(nn.Module):
    """FCOS with a feature pyramid on any timm or torchvision backbone."""

    loss_names = ("classification", "box_regression", "centerness")

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        backbone: BackboneName = "timm/mobilenetv2_100",
        width: Annotated[Count, Field(multiple_of=_GROUPS, description="Channels of the pyramid and the heads.")] = 96,
        depth: Annotated[Count, Field(description="Convolutions of each head.")] = 2,
        min_stride: Annotated[Count, Field(description="The stride of the finest feature map that predicts.")] = 8,
        center_radius: Annotated[Positive, Field(description="Strides from a box's center that are positive.")] = 1.5,
        score_thresh: Share = 0.05,
        nms_thresh: Share = 0.6,
        detections_per_img: Count = 100,
        backbone_args: LibraryArgs | None = None,
    ) -> None:
        super().__init__()
        encoder = build_encoder(backbone, in_channels, backbone_args or {})
        used = [index for index, stride in enumerate(encoder.strides) if stride >= min_stride]
        if not used:
            raise ValueError(f"backbone {backbone!r} has no feature map of stride {min_stride} or more")
        self.strides = [encoder.strides[index] for index in used]
        self.backbone = encoder.module
        self.pyramid = nn.ModuleList(FPNLevel(encoder.channels[index], width) for index in used)
        self.class_head = _head(width, depth, num_classes)
        self.box_head = _head(width, depth, 5)  # four distances and the centerness
        self.scales = nn.Parameter(torch.ones(len(used)))
        self._first_level = used[0]
        self._center_radius = center_radius
        self._select = partial(
            select_detections,
            score_thresh=score_thresh,
            nms_thresh=nms_thresh,
            detections_per_img=detections_per_img,
        )
        self.selection = self._select.keywords
        """How the detections of an image are selected among its candidates."""
        nn.init.constant_(self.class_head[-1].bias, -math.log((1 - _PRIOR) / _PRIOR))  # type: ignore[arg-type]

    def forward(
        self, images: Tensor, targets: Sequence[Target] | None = None, image_sizes: ImageSizes | None = None
    ) -> LossParts | list[Detections]:
        """The losses of images [N, C, H, W] beside their targets; without targets, what is detected in each image."""
        if targets is None:
            return [self._select(*each) for each in zip(*self.candidates(images, image_sizes), strict=True)]
        logits, boxes, cells = self._predict(images, image_sizes)
        return self._losses(logits, boxes, cells, targets)

    def candidates(self, images: Tensor, image_sizes: ImageSizes | None = None) -> tuple[Tensor, Tensor]:
        """A box of every cell [N, P, 4], and its scores [N, P, C]."""
        logits, boxes, cells = self._predict(images, image_sizes)
        height, width = images.shape[-2:]
        scores = (logits.sigmoid() * boxes[..., 4:].sigmoid()).sqrt()
        corners = _around(cells.centers, boxes[..., :4])
        across, down = corners[..., ::2].clamp(0, width), corners[..., 1::2].clamp(0, height)
        if image_sizes is not None:
            heights, widths = constant(image_sizes, images.device, corners.dtype)[:, :, None, None].unbind(1)
            across, down = torch.minimum(across, widths), torch.minimum(down, heights)
        return torch.stack([across, down], -1).flatten(-2), scores

    def count(self, images: Tensor, targets: Sequence[Target]) -> dict[str, Tensor]:
        """What each loss is divided by; it depends on the targets and the size of the images alone."""
        sizes = [(-(-images.shape[-2] // stride), -(-images.shape[-1] // stride)) for stride in self.strides]
        cells = self._cells(sizes, targets[0]["boxes"].device)
        classes, _, centerness = self._assign(cells, targets)
        count = (classes >= 0).sum()
        return {"classification": count, "box_regression": to_float64(centerness).sum(), "centerness": count}

    def _predict(self, images: Tensor, image_sizes: ImageSizes | None) -> tuple[Tensor, Tensor, Cells]:
        """Class logits [N, P, C], distances and centerness [N, P, 5], and the cells; nothing is in the padding."""
        features = self.backbone(images)[self._first_level :]
        logits, boxes, sizes = [], [], []
        above: Tensor | None = None
        for index in reversed(range(len(features))):
            above, smooth = self.pyramid[index](features[index], above)
            raw = self.box_head(smooth).float()
            distances = F.softplus(raw[:, :4] * self.scales[index].float()) * self.strides[index]
            logits.append(self.class_head(smooth).float().flatten(2).transpose(1, 2))
            boxes.append(torch.cat([distances, raw[:, 4:]], 1).flatten(2).transpose(1, 2))
            sizes.append((smooth.shape[-2], smooth.shape[-1]))
            if image_sizes is not None:
                inside = cells_inside(image_sizes, sizes[-1], [self.strides[index]] * 2, images.device)
                logits[-1] = logits[-1].masked_fill(~inside.flatten(1)[..., None], ABSENT)
        cells = self._cells(sizes[::-1], images.device)
        return torch.cat(logits[::-1], 1), torch.cat(boxes[::-1], 1), cells

    def _cells(self, sizes: Sequence[tuple[int, int]], device: torch.device) -> Cells:
        centers, strides, reach = [], [], []
        for level, ((height, width), stride) in enumerate(zip(sizes, self.strides, strict=True)):
            rows, columns = (torch.arange(number, device=device) for number in (height, width))
            y, x = torch.meshgrid(rows, columns, indexing="ij")
            centers.append((torch.stack([x, y], -1).flatten(0, 1) + 0.5) * stride)
            least = 0.0 if level == 0 else _LEVEL_SCALE * stride
            most = math.inf if level == len(sizes) - 1 else 2 * _LEVEL_SCALE * stride
            strides.append(torch.full((height * width,), float(stride), device=device))
            reach.append(constant([[least, most]], device).expand(height * width, 2))
        return Cells(torch.cat(centers), torch.cat(strides), torch.cat(reach))

    def _losses(self, logits: Tensor, boxes: Tensor, cells: Cells, targets: Sequence[Target]) -> LossParts:
        classes, wanted, centerness = self._assign(cells, targets)
        positive = classes >= 0
        count = positive.sum()
        one_hot = F.one_hot(classes.clamp(min=0), logits.shape[-1]).to(logits) * positive[..., None]
        # All cells are computed, the background with a weight of 0: a device would have to tell which ones to select.
        overlaps = _generalized_iou(_around(cells.centers, boxes[..., :4]), _around(cells.centers, wanted))
        middles = F.binary_cross_entropy_with_logits(boxes[..., 4], centerness, reduction="none")
        return {
            "classification": (_focal_loss(logits, one_hot), count),
            "box_regression": (((1 - overlaps) * centerness).sum(), to_float64(centerness).sum()),
            "centerness": ((middles * positive).sum(), count),
        }

    def _assign(self, cells: Cells, targets: Sequence[Target]) -> Assignment:
        """What the cells of all images are to predict, [N, P]; of the background, distances 1 and centerness 0."""
        each = [assign(cells, target, self._center_radius) for target in targets]
        classes, distances, centerness = map(torch.stack, zip(*each, strict=True))
        is_background = classes < 0
        return Assignment(
            classes,
            distances.masked_fill(is_background[..., None], 1.0),
            centerness.masked_fill(is_background, 0.0),
        )


def assign(cells: Cells, target: Target, center_radius: float) -> Assignment:
    """Assign the smallest box to each cell that lies near its center, inside it, and on the level of its size."""
    boxes, labels = target["boxes"].float(), target["labels"]
    num_cells = len(cells.centers)
    if not len(boxes):
        none = boxes.new_zeros(num_cells, 4)
        return Assignment(labels.new_full((num_cells,), -1), none, none[:, 0])
    x, y = cells.centers[:, None].unbind(-1)  # [P, 1]
    distances = torch.stack([x - boxes[:, 0], y - boxes[:, 1], boxes[:, 2] - x, boxes[:, 3] - y], -1)  # [P, K, 4]
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    near = (cells.centers[:, None] - middle).abs().amax(-1) < center_radius * cells.strides[:, None]
    longest = distances.amax(-1)
    fits = (longest > cells.reach[:, :1]) & (longest <= cells.reach[:, 1:])
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    candidates = torch.where(near & fits & (distances.amin(-1) > 0), areas, math.inf)  # [P, K]
    least, chosen = candidates.min(1)
    classes = labels[chosen].masked_fill(least.isinf(), -1)
    own = distances[torch.arange(num_cells, device=boxes.device), chosen]
    pairs = own.clamp(min=1e-6).view(-1, 2, 2)  # left, upper; right, lower
    centerness = (pairs.amin(1) / pairs.amax(1)).prod(-1).sqrt()
    return Assignment(classes, own, centerness)


def _head(width: int, depth: int, out_channels: int) -> nn.Sequential:
    """Convolutions that all levels share; GroupNorm, since the statistics of levels differ."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(_GROUPS, width), nn.ReLU()]
    last = nn.Conv2d(width, out_channels, 3, padding=1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)  # type: ignore[arg-type]
    return nn.Sequential(*layers, last)


def _around(centers: Tensor, distances: Tensor) -> Tensor:
    """Boxes [..., 4] as x1 y1 x2 y2, given the distances from points to their edges."""
    return torch.cat([centers - distances[..., :2], centers + distances[..., 2:]], -1)


def _focal_loss(logits: Tensor, targets: Tensor) -> Tensor:
    probabilities = logits.sigmoid()
    errors = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    distance = (probabilities * (1 - targets) + (1 - probabilities) * targets) ** _GAMMA
    weights = _ALPHA * targets + (1 - _ALPHA) * (1 - targets)
    return (weights * distance * errors).sum()


def _generalized_iou(first: Tensor, second: Tensor) -> Tensor:
    """The generalized IoU of boxes [..., 4], pair by pair, from -1 to 1."""
    (upper, lower), (other_upper, other_lower) = ((boxes[..., :2], boxes[..., 2:]) for boxes in (first, second))
    areas = [(lower - upper).prod(-1), (other_lower - other_upper).prod(-1)]
    inner = (torch.minimum(lower, other_lower) - torch.maximum(upper, other_upper)).clamp(min=0)
    outer = torch.maximum(lower, other_lower) - torch.minimum(upper, other_upper)
    overlap, hull = inner.prod(-1), outer.prod(-1).clamp(min=1e-7)
    union = (areas[0] + areas[1] - overlap).clamp(min=1e-7)
    return overlap / union - (hull - union) / hull
