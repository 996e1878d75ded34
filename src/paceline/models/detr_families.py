"""The transformer detectors that can be trained: what their loss functions are given, and their losses' weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core.errors import ArgumentError
from paceline.models.detr_losses import (
    Corners,
    DetrLosses,
    Layers,
    iou_aware_loss,
    layers_of,
    varifocal_loss,
)
from paceline.models.detr_matching import MatchingCost


class Family(NamedTuple):
    """What models of one configuration class have in common."""

    losses: Callable[[Any], DetrLosses]
    size_divisible: Callable[[Any], int]
    """The sides of images are padded to multiples of this."""


def _rt_detr_losses(config: Any) -> DetrLosses:
    weights = {f"loss_{name}": getattr(config, f"weight_loss_{name}") for name in ("vfl", "bbox", "giou")}
    return DetrLosses(config, _focal_cost(config), weights, varifocal_loss, _read_rt_detr, config.num_denoising)


def _d_fine_losses(config: Any) -> DetrLosses:
    names = ("vfl", "bbox", "giou", "fgl", "ddf")
    weights = {f"loss_{name}": getattr(config, f"weight_loss_{name}") for name in names}
    return DetrLosses(config, _focal_cost(config), weights, varifocal_loss, _read_d_fine, config.num_denoising)


def _lw_detr_losses(config: Any) -> DetrLosses:
    weights = {f"loss_{name}": getattr(config, f"{key}_loss_coefficient") for name, key in _LW_DETR_LOSSES.items()}
    cost = MatchingCost(config.class_cost, config.bbox_cost, config.giou_cost)
    return DetrLosses(config, cost, weights, iou_aware_loss, _read_lw_detr, num_groups=config.group_detr)


_LW_DETR_LOSSES = {"ce": "class", "bbox": "bbox", "giou": "giou"}


def _focal_cost(config: Any) -> MatchingCost:
    if not config.auxiliary_loss:
        raise ArgumentError("args.auxiliary_loss", "expected true: every layer of the decoder has losses")
    return MatchingCost(
        config.matcher_class_cost, config.matcher_bbox_cost, config.matcher_giou_cost,
        config.matcher_alpha, config.matcher_gamma, config.use_focal_loss,
    )  # fmt: skip


def _read_rt_detr(
    logits: Tensor, boxes: Tensor, by_layer: Tensor, boxes_by_layer: Tensor, enc_topk_logits: Tensor,
    enc_topk_bboxes: Tensor, denoising_meta_values: Any = None, **_: Any,
) -> tuple[Layers, Layers | None]:  # fmt: skip
    """All layers and the encoder's proposals; decoder layers come as [N, L, Q, …]."""
    (denoised, own), (denoised_boxes, own_boxes) = (
        _split(each.transpose(0, 1), denoising_meta_values) for each in (by_layer, boxes_by_layer)
    )
    layers = layers_of([own, enc_topk_logits], [own_boxes, enc_topk_bboxes])
    return layers, None if denoised is None or denoised_boxes is None else layers_of([denoised], [denoised_boxes])


def _read_d_fine(
    logits: Tensor, boxes: Tensor, by_layer: Tensor, boxes_by_layer: Tensor, enc_topk_logits: Tensor,
    enc_topk_bboxes: Tensor, denoising_meta_values: Any, predicted_corners: Tensor,
    initial_reference_points: Tensor, **_: Any,
) -> tuple[Layers, Layers | None]:  # fmt: skip
    """The last layer, the encoder's proposals, and layers with corners before them.

    There is one more layer of logits and boxes than of corners: the prediction before the first refinement. The library
    pairs them from the front, and so does this.
    """
    boxes_by_layer, enc_topk_bboxes = boxes_by_layer.clamp(0, 1), enc_topk_bboxes.clamp(0, 1)
    outputs = (by_layer, boxes_by_layer, predicted_corners, initial_reference_points)
    parts = [_split(each.transpose(0, 1), denoising_meta_values) for each in outputs]
    own, own_boxes, corners, references = (each for _, each in parts)
    early = min(len(own), len(corners)) - 1
    layers = layers_of([own[:early], own[-1], enc_topk_logits], [own_boxes[:early], own_boxes[-1], enc_topk_bboxes])
    layers = layers._replace(corners=_corners(corners[:early], references[:early], corners[-1], own[-1]))
    copies, copied_boxes, corners, references = (each for each, _ in parts)  # type: ignore[assignment]
    if copies is None or copied_boxes is None:
        return layers, None
    number = len(corners)
    denoised = layers_of([copies[:number]], [copied_boxes[:number]])
    return layers, denoised._replace(corners=_corners(corners, references, corners[-1], copies[-1]))


def _corners(*parts: Tensor) -> Corners:
    return Corners(*(each.float() if each.dtype.itemsize < 4 else each for each in parts))


def _read_lw_detr(
    logits: Tensor, boxes: Tensor, by_layer: Tensor | None, boxes_by_layer: Tensor | None, encoder_logits: Tensor,
    encoder_boxes: Tensor, **_: Any,
) -> tuple[Layers, None]:  # fmt: skip
    """All layers, which come as [L, N, Q, …], and the encoder's proposals."""
    earlier = [] if by_layer is None or boxes_by_layer is None else [(by_layer[:-1], boxes_by_layer[:-1])]
    rows = [*earlier, (logits, boxes), (encoder_logits, encoder_boxes)]
    return layers_of([each for each, _ in rows], [each for _, each in rows]), None


def _split(values: Tensor, sizes: Any) -> tuple[Tensor | None, Tensor]:
    """What is of denoising queries [L, N, Q, …], if there are any, and what is of the others."""
    if sizes is None:
        return None, values
    number = sizes["dn_num_split"][0]
    return values[:, :, :number], values[:, :, number:]


def _patch_side(config: Any) -> int:
    """A window of a ViT's patches, in pixels."""
    backbone = config.backbone_config
    across = math.isqrt(backbone.num_windows) if backbone.model_type == "lw_detr_vit" else backbone.num_windows
    return int(backbone.patch_size * across)


FAMILIES = {
    "d_fine": Family(_d_fine_losses, lambda _: 32),
    "lw_detr": Family(_lw_detr_losses, _patch_side),
    "rf_detr": Family(_lw_detr_losses, _patch_side),
    "rt_detr_v2": Family(_rt_detr_losses, lambda _: 32),
}
