"""What losses of pixels are given: masks, and logits of the same size."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.counting import counted
from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.losses.class_numbers import full_precision


def masks_of(loss: str, batch: Batch) -> Tensor:
    """The masks of a batch, [N, H, W]."""
    if "mask" not in batch:
        raise DataError(f"{loss} compares outputs with masks, and these samples have none; use data with masks")
    masks: Tensor = batch["mask"]
    return masks


def class_logits(loss: str, outputs: Tensor, masks: Tensor, num_classes: int) -> Tensor:
    """The outputs in full precision, [N, C, H, W], if they fit the masks and the classes."""
    if outputs.ndim != 4 or outputs.shape[1] != num_classes:
        raise DataError(
            f"{loss}: outputs of shape {list(outputs.shape)} do not fit data of {counted(num_classes, 'class')}; "
            f"expected [N, {num_classes}, H, W]"
        )
    _check_size(loss, outputs, masks)
    return full_precision(outputs)


def binary_pair(loss: str, outputs: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets from 0 to 1, both [N, H, W], of outputs [N, 1, H, W] or [N, H, W] and grey masks."""
    logits = outputs.squeeze(1) if outputs.ndim == 4 and outputs.shape[1] == 1 else outputs
    if logits.ndim != 3:
        raise DataError(
            f"{loss}: outputs of shape {list(outputs.shape)} are not one number for each pixel; "
            "expected [N, 1, H, W], and masks that are grey, from 0 to 255"
        )
    _check_size(loss, logits, masks)
    logits = full_precision(logits)
    return logits, masks.to(logits.dtype) / 255


def labelled(masks: Tensor, ignore_index: int | None) -> Tensor | None:
    """Which pixels count, bool [N, H, W]; None for all."""
    return None if ignore_index is None else masks != ignore_index


def check_ids(loss: str, batch: Batch, num_classes: int, ignore_index: int | None) -> None:
    """Raise DataError if a mask holds an id that is none of a class; reads the masks, so for those on the host."""
    masks = masks_of(loss, batch)
    counting = labelled(masks, ignore_index)
    known = masks if counting is None else masks.masked_fill(~counting, 0)
    if known.numel() == 0 or int(known.max()) < num_classes:
        return
    worst = known.flatten(1).amax(1)
    sample = batch.ids[int((worst >= num_classes).nonzero()[0])]
    raise DataError(
        f"{loss}: the mask of sample {int(sample)} holds the id {int(known.max())}; "
        + expected_ids(num_classes, ignore_index)
    )


def expected_ids(num_classes: int, ignore_index: int | None) -> str:
    """What a mask may hold, and what to do about anything else."""
    if num_classes == 1:
        return "expected ids of classes, and there is only one; for masks that are grey use pixel_bce"
    ignored = "set ignore_index to leave pixels out" if ignore_index is None else f"or {ignore_index}, ignore_index"
    return f"expected 0 to {num_classes - 1}, {ignored}; a transform's mask_fill is an id too"


def pixel_weights(weights: Tensor | None, masks: Tensor, counting: Tensor | None) -> Tensor | None:
    """What each pixel weighs, [N, H, W]: as its class does, and 0 where it does not count; None if all weigh 1."""
    if weights is None:
        return None if counting is None else counting.float()
    own = weights[masks.long().clamp(max=len(weights) - 1)]
    return own if counting is None else own * counting


def counts_of_classes(masks: Tensor, num_classes: int, ignore_index: int | None) -> Tensor:
    """How many pixels of each class there are, int64 [C], those that are ignored left out."""
    counts = torch.bincount(masks.flatten(), minlength=num_classes)[:num_classes]
    if ignore_index is not None and ignore_index < num_classes:
        counts[ignore_index] = 0
    return counts


def _check_size(loss: str, outputs: Tensor, masks: Tensor) -> None:
    if outputs.shape[0] == masks.shape[0] and outputs.shape[-2:] == masks.shape[-2:]:
        return
    raise DataError(
        f"{loss}: {_described(outputs, 'output')} do not fit {_described(masks, 'mask')}; losses compare pixel with "
        "pixel, so the task has to resize outputs to the masks first"
    )


def _described(planes: Tensor, noun: str) -> str:
    return f"{counted(len(planes), noun)} of {planes.shape[-1]}×{planes.shape[-2]} pixels"
