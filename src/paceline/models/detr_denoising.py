"""Denoising queries of DETRs: noisy copies of the objects, which the decoder has to restore (Zhang et al., DINO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from paceline.models.detr_matching import Places, to_corners


def num_groups(num_queries: int, numbers: Sequence[int]) -> int:
    """How many times the objects of a micro-batch are copied; 0 without objects."""
    most = max(numbers, default=0)
    return max(1, num_queries // most) if most and num_queries > 0 else 0


def denoised_places(numbers: Sequence[int], groups: int, num_layers: int) -> Places:
    """The queries that are to restore an object: of each group, the first half."""
    most = max(numbers, default=0)
    places = [
        (layer, image, 2 * most * group + number, number)
        for layer in range(num_layers)
        for image, total in enumerate(numbers)
        for group in range(groups)
        for number in range(total)
    ]
    return np.array(places, np.int64).reshape(-1, 4).T


def denoising_queries(
    targets: Sequence[Mapping[str, Tensor]],
    num_classes: int,
    num_queries: int,
    class_embed: nn.Module,
    num_denoising_queries: int = 100,
    label_noise_ratio: float = 0.5,
    box_noise_scale: float = 1.0,
) -> tuple[Any, Any, Any, Any]:
    """Class embeddings, boxes as logits, attention mask and sizes: what transformers' function of the task gives.

    It draws the same numbers from torch's generator and, unlike that, reads none from the device.
    """
    numbers = [len(each["class_labels"]) for each in targets]
    groups = num_groups(num_denoising_queries, numbers)
    if not groups:
        return None, None, None, None
    most = max(numbers)
    labels = pad_sequence([each["class_labels"] for each in targets], True, num_classes).int()  # [N, T]
    boxes = pad_sequence([each["boxes"].float() for each in targets], True).tile(1, 2 * groups, 1)  # [N, 2·G·T, 4]
    is_object, labels = (labels < num_classes).tile(1, 2 * groups), labels.tile(1, 2 * groups)
    is_far = (torch.arange(2 * groups * most, device=boxes.device) // most % 2)[None, :, None].to(boxes)
    if label_noise_ratio > 0:
        is_noisy = torch.rand_like(labels, dtype=torch.float) < label_noise_ratio * 0.5
        drawn = torch.randint_like(is_noisy, 0, num_classes, dtype=labels.dtype)
        labels = torch.where(is_noisy & is_object, drawn, labels)
    if box_noise_scale > 0:
        signs = torch.randint_like(boxes, 0, 2) * 2.0 - 1.0
        shifts = (torch.rand_like(boxes) + is_far) * signs  # the second half of a group is farther from its object
        corners = to_corners(boxes) + shifts * ((boxes[..., 2:] * 0.5).tile(1, 1, 2) * box_noise_scale)
        corners = corners.clip(0.0, 1.0)
        low, high = corners[..., :2], corners[..., 2:]
        boxes = torch.cat([(low + high) / 2, high - low], -1).clip(0.0, 1.0)
        boxes = (boxes.clamp(min=1e-5) / (1 - boxes).clamp(min=1e-5)).log()
    total = 2 * groups * most
    sizes = {"dn_num_group": groups, "dn_num_split": [total, num_queries]}
    return class_embed(labels), boxes, _attention_mask(groups, total, num_queries, boxes), sizes


def _attention_mask(groups: int, total: int, num_queries: int, like: Tensor) -> Tensor:
    """-inf where a query must not see another: denoising queries are seen by their own group alone."""
    group = torch.arange(total + num_queries, device=like.device) // (total // groups)
    group = group.clamp(max=groups)  # all other queries
    hidden = (group[None] < groups) & (group[None] != group[:, None])
    return torch.zeros(hidden.shape, device=like.device).masked_fill(hidden, -torch.inf)
