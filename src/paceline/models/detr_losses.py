"""The losses of DETRs as sums: of RT-DETR, D-FINE and LW-DETR, over all decoder layers at once.

They are those of transformers (`transformers.loss`), which divides them by the boxes of one forward pass. Here the sum
and its count are apart, nothing is read from the device but the costs of matching, and pairs are not found by masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.models.detector import LossParts
from paceline.models.detr_denoising import denoised_places, num_groups
from paceline.models.detr_matching import (
    MatchingCost,
    Objects,
    Places,
    generalized_iou,
    match,
    start_copy,
    to_corners,
)

_TEMPERATURE = 5.0  # of D-FINE's distillation
_DENOISING = "_dn"
_MATCHED, _REST = "loss_ddf_matched", "loss_ddf_rest"
Sums = dict[str, Tensor]


class Corners(NamedTuple):
    """What D-FINE predicts of the edges of boxes, in the first K of the layers."""

    logits: Tensor
    """[K, N, Q, 4 · (bins + 1)]"""
    references: Tensor
    """[K, N, Q, 4], boxes that the edges are measured from."""
    teacher: Tensor
    """[N, Q, 4 · (bins + 1)], of the last layer."""
    teacher_logits: Tensor
    """[N, Q, C]"""


class Layers(NamedTuple):
    """Predictions of S layers."""

    logits: Tensor
    """[S, N, Q, C]"""
    boxes: Tensor
    """[S, N, Q, 4] as center x, center y, width, height, in shares of the image."""
    corners: Corners | None = None


class Pairs(NamedTuple):
    """M predictions and the objects that they are to become."""

    places: tuple[Tensor, Tensor, Tensor]
    """Layer, image and query, [M] each; sorted by layer."""
    labels: Tensor
    predicted: Tensor
    """[M, 4], by center and size."""
    wanted: Tensor
    iou: Tensor
    """[M], without gradient."""
    giou: Tensor

    def first(self, number: int) -> Pairs:
        """The first pairs, those of the first layers."""
        places = tuple(each[:number] for each in self.places)
        return Pairs(places, *(each[:number] for each in self[1:]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class DetrLosses:
    """The losses of a kind of DETR; in place of a transformers model's `loss_function`.

    `weights` are those of its configuration, by the names of transformers.
    """

    config: Any
    cost: MatchingCost
    weights: Mapping[str, float]
    label_loss: Callable[[Layers, Pairs, Any], Tensor]
    read: Callable[..., tuple[Layers, Layers | None]]
    """What the model hands to its loss function as layers: those to match and those of denoising queries."""
    num_denoising: int = 0
    num_groups: int = 1
    """Groups of queries that are matched independently while training."""

    @property
    def names(self) -> list[str]:
        """The names of the losses; those of denoising queries last."""
        names = [each for each in self.weights if each != "loss_ddf"]
        names += [_MATCHED, _REST] if "loss_ddf" in self.weights else []
        return names + [name + _DENOISING for name in names if self.num_denoising]

    def __call__(
        self, logits: Tensor, labels: Sequence[Mapping[str, Tensor]], device: Any, boxes: Tensor, config: Any,
        *outputs: Any, **more: Any,
    ) -> tuple[None, LossParts, None]:  # fmt: skip
        """What transformers expects of a loss function; the second part is the sum and count of each loss."""
        layers, denoised = self.read(logits, boxes, *outputs, **more)
        numbers = [len(each["class_labels"]) for each in labels]
        padded = [pad_sequence([each[name] for each in labels], True) for name in ("class_labels", "boxes")]
        objects = Objects(numbers, padded[0], _full(padded[1]))
        with torch.no_grad():
            wait = start_copy(self.cost(layers.logits, layers.boxes, objects))
        groups = layers.logits.shape[2] // config.num_queries
        sums: Sums = {}
        if denoised is not None:  # while the costs are on their way
            places = denoised_places(numbers, num_groups(self.num_denoising, numbers), len(denoised.logits))
            found = self._sums(denoised, objects, places)
            sums |= {name + _DENOISING: each for name, each in found.items()}
        sums |= self._sums(layers, objects, match(wait(), numbers, groups))
        counts = self.count(numbers, groups, 0 if denoised is None else None)
        return None, {name: (sums.get(name, logits.new_zeros(())), counts[name]) for name in self.names}, None

    def count(self, numbers: Sequence[int], groups: int, copies: int | None = None) -> dict[str, float]:
        """What each loss of a micro-batch counts, given the objects of its images; `copies` are those that denoise."""
        copies = num_groups(self.num_denoising, numbers) if copies is None else copies
        queries = self.config.num_queries
        counts = dict.fromkeys(self.names, float(sum(numbers) * groups))
        pairs = sum(min(number, queries) for number in numbers) * groups
        edges = {"": (pairs, len(numbers) * queries * groups)}
        if self.num_denoising:
            pairs, total = sum(numbers) * copies, len(numbers) * 2 * max(numbers, default=0) * copies
            edges[_DENOISING] = (pairs, total)
            counts |= {name: float(pairs) for name in self.names if name.endswith(_DENOISING)}
        for kind, (matched, total) in edges.items():
            if _MATCHED + kind in counts:
                counts |= {_MATCHED + kind: 4.0 * matched, _REST + kind: 4.0 * (total - matched)}
        return counts

    def divisors(self, counts: Mapping[str, float]) -> dict[str, float]:
        """What the sums of a global batch are divided by, given its counts.

        D-FINE weighs the mean over edges of matched queries and that over all others by the roots of their numbers.
        """
        divisors = dict(counts)
        for kind in ("", _DENOISING):
            if _MATCHED + kind in counts:
                matched, rest = counts[_MATCHED + kind] ** 0.5, counts[_REST + kind] ** 0.5
                divisors |= {_MATCHED + kind: matched * (matched + rest), _REST + kind: rest * (matched + rest)}
        return divisors

    def _sums(self, layers: Layers, objects: Objects, places: Places) -> Sums:
        """The weighted sum of each loss over layers, images and queries."""
        layer, image, query, column = torch.from_numpy(places).to(layers.logits.device, non_blocking=True)
        predicted, wanted = layers.boxes[layer, image, query], objects.boxes[image, column]
        giou, iou = generalized_iou(to_corners(predicted), to_corners(wanted))
        labels = objects.labels[image, column]
        pairs = Pairs((layer, image, query), labels, predicted, wanted, iou.detach(), giou)
        label_name = next(iter(self.weights))
        sums = {
            label_name: self.label_loss(layers, pairs, self.config),
            "loss_bbox": (predicted - wanted).abs().sum(),
            "loss_giou": (1 - giou).sum(),
        }
        if layers.corners is not None:
            number = int(np.searchsorted(places[0], len(layers.corners.logits)))
            sums |= _corner_losses(layers.corners, pairs.first(number), self.config)
        return {name: each * self._weight(name) for name, each in sums.items()}

    def _weight(self, name: str) -> float:
        return self.weights["loss_ddf" if name in (_MATCHED, _REST) else name]


def varifocal_loss(layers: Layers, pairs: Pairs, config: Any) -> Tensor:
    """RT-DETR's: a matched query is to predict its IoU, all others 0."""
    place = (*pairs.places, pairs.labels)
    scores = torch.zeros_like(layers.logits).index_put_(place, pairs.iou)
    is_target = torch.zeros_like(layers.logits).index_put_(place, torch.ones_like(pairs.iou))
    probabilities = layers.logits.detach().sigmoid()
    weights = config.focal_loss_alpha * probabilities**config.focal_loss_gamma * (1 - is_target) + scores
    return F.binary_cross_entropy_with_logits(layers.logits, scores, weights, reduction="sum")


def iou_aware_loss(layers: Layers, pairs: Pairs, config: Any) -> Tensor:
    """LW-DETR's: a matched query is to predict a mean of its score and its IoU, all others 0."""
    place = (*pairs.places, pairs.labels)
    probabilities = layers.logits.sigmoid()
    alpha = config.focal_alpha
    wanted = (probabilities[place].detach() ** alpha * pairs.iou ** (1 - alpha)).clamp(min=0.01)
    present = torch.zeros_like(layers.logits).index_put_(place, wanted)
    absent = torch.where(present > 0, 1 - present, probabilities**2)
    return -(present * F.logsigmoid(layers.logits) + absent * F.logsigmoid(-layers.logits)).sum()


def _corner_losses(corners: Corners, pairs: Pairs, config: Any) -> Sums:
    """D-FINE's: the bins of each edge, and what the layers learn from the last one."""
    bins = config.max_num_bins
    left, share = _edge_bins(corners.references[pairs.places].detach(), to_corners(pairs.wanted), config)
    logits = corners.logits[pairs.places].view(-1, bins + 1)  # [M · 4, bins + 1]
    errors = [F.cross_entropy(logits, left + step, reduction="none") for step in (0, 1)]
    of_bins = (errors[0] * (1 - share) + errors[1] * share) * pairs.iou.repeat_interleave(4)

    edges = corners.logits.view(*corners.logits.shape[:-1], 4, bins + 1) / _TEMPERATURE
    taught = corners.teacher.detach().view(*edges.shape[1:]) / _TEMPERATURE
    wanted = taught.softmax(-1).expand_as(edges)
    distances = _TEMPERATURE**2 * F.kl_div(edges.log_softmax(-1), wanted, reduction="none").sum((-1, -2))  # [K, N, Q]
    probabilities = corners.teacher_logits.detach().sigmoid().amax(-1).expand_as(distances)
    matched = torch.zeros_like(distances).index_put_(pairs.places, torch.ones_like(pairs.iou))
    weights = probabilities.clone().index_put_(pairs.places, pairs.iou)
    of_matched = (weights * distances * matched).sum()
    return {
        "loss_fgl": of_bins.sum(),
        _MATCHED: of_matched,
        _REST: (weights * distances * (1 - matched)).sum(),
    }


def _edge_bins(references: Tensor, wanted: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """The lower of the two bins that each edge lies between, int64 [M · 4], and how near it is to the upper one."""
    bins, scale, upper = config.max_num_bins, abs(config.reg_scale), abs(config.up)
    centers, sizes = references[:, :2], references[:, 2:] / scale + 1e-16
    low, high = (centers - wanted[:, :2]) / sizes, (wanted[:, 2:] - centers) / sizes
    distances = (torch.cat([low, high], -1) - 0.5 * scale).flatten()
    step = (upper * scale + 1) ** (2 / (bins - 2))
    half = [step**power - 1 for power in range(1, bins // 2)]
    limits = [-2 * upper * scale, *(-each for each in reversed(half)), 0.0, *half, 2 * upper * scale]
    edges = torch.tensor(limits, dtype=distances.dtype).to(distances.device, non_blocking=True)
    index = (edges <= distances[:, None]).sum(1) - 1
    left = index.clamp(0, bins - 1)
    below, above = (distances - edges[left]).abs(), (edges[left + 1] - distances).abs()
    share = below / (below + above)
    return left, share.masked_fill(index < 0, 0.0).masked_fill(index >= bins, 1.0)


def _full(values: Tensor) -> Tensor:
    """The values in single precision, or in the double one that they have."""
    return values if values.dtype == torch.float64 else values.float()


def layers_of(logits: Sequence[Tensor], boxes: Sequence[Tensor]) -> Layers:
    """Layers one behind the other, each of them or several at once ([S, N, Q, …])."""
    joined = [torch.cat([each if each.ndim == 4 else each[None] for each in some]) for some in (logits, boxes)]
    return Layers(_full(joined[0]), _full(joined[1]))
