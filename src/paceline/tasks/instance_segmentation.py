"""Instance segmentation: the mask, the box and the class of each object, and how certain they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.core.errors import DataError, ExportError, RecipeError
from paceline.core.registry import register
from paceline.data.batch import TRUTHS, Batch
from paceline.data.io.mask import decode_runs, pack_masks
from paceline.data.transforms.annotations import invert_affine
from paceline.data.transforms.functional import warp_mask
from paceline.metrics.detection import mistakes_in
from paceline.metrics.instances import CocoMaskAP, EncodedInstances, InstanceRows, instances_state, masked_objects
from paceline.metrics.metric import Metric
from paceline.models.detector import Detector, Instances, Target
from paceline.tasks.detection import DRAWN_SCORE, Detection, Drawn, select, to_original
from paceline.visualize.image import Image

_DIVISORS = (1000, 256)
_NUM_IDS = 65_536


@register.task("instance_segmentation")
class InstanceSegmentation(Detection):
    """Detects the objects of an image and their masks. The model brings its losses; `loss_weights` weighs them."""

    main_metric = "mask_ap50"
    error_name = f"false and missed objects at score {DRAWN_SCORE}"
    needs_masks = True
    _detects = Instances

    def _own_metrics(self) -> list[Metric]:
        return [CocoMaskAP(self.classes), *super()._own_metrics()]

    def _loss_names(self, model: nn.Module) -> Sequence[str]:
        if not isinstance(model, Detector) or not getattr(model, "predicts_masks", False):
            raise RecipeError(
                f"model: {type(model).__name__} predicts no masks of objects; use mask_rcnn or"
                " torchvision/detection/maskrcnn_…, or give your model `loss_names`, `predicts_masks = True` and a"
                " forward(images, targets=None), as docs/instance_segmentation.md describes"
            )
        return model.loss_names

    def _targets(self, batch: Batch) -> list[Target]:
        if "masks" not in batch:
            raise DataError(
                "instance_segmentation: these samples have no masks of objects; set `masks: true` of coco or yolo, or"
                " use image_instances"
            )
        return super()._targets(batch)

    def predict(self, model: nn.Module, batch: Batch) -> list[EncodedInstances]:
        """What is detected in each image, in pixels of the image as it was read."""
        return [encode_instances(each, batch, index) for index, each in enumerate(self._detect(model, batch))]

    def export_outputs(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        raise ExportError(
            f"{type(model).__name__} selects boxes inside the model, by the operator torchvision::nms, and predicts"
            " masks of those alone, which graphs of any batch size cannot; export its weights with --format safetensors"
        )

    def sample_errors(self, predictions: list[Any], batch: Batch) -> Tensor:
        """How many masks with a score above 0.3 are false, and how many objects are missed, of each image, [N]."""
        return mistakes_in(batch.ids, *masked_objects(instances_state(predictions, batch)), DRAWN_SCORE)

    def draw_metrics(self, metrics: dict[str, Any]) -> dict[str, Image]:
        """Draw the precision-recall curves of masks, as of boxes in detection."""
        names = ("precision", "num_objects")
        return super().draw_metrics({name: metrics[f"mask_{name}"] for name in names if f"mask_{name}" in metrics})

    def instance_metric(self) -> Metric:
        return InstanceRows()

    def instance_maps(self, predictions: Sequence[EncodedInstances]) -> Iterator[tuple[NDArray[np.uint16], int]]:
        """The file of each sample, and how many instances it has no id for.

        Ids are class · `id_divisor` + number, from 1 each, the most certain on top; 0 elsewhere. They are those that
        are drawn: with a score of 0.3 or more, or from `min_score` on.
        """
        least = DRAWN_SCORE if self._min_score is None else self._min_score
        divisor = id_divisor(len(self.classes))
        for each in predictions:
            found = select(each, each.scores >= least)
            ids, numbers, left_out = np.zeros(found.size, np.uint16), [0] * len(self.classes), 0
            for label, mask in zip(found.labels.tolist(), decode_runs(found.runs, *found.size), strict=True):
                is_seen = (mask > 0) & (ids == 0)
                if is_seen.any() and numbers[label] + 1 < divisor:
                    numbers[label] += 1
                    ids[is_seen] = (label + 1) * divisor + numbers[label]
                else:
                    left_out += int(is_seen.any())
            yield ids, left_out

    def _truth_to_draw(self, batch: Batch, index: int) -> Drawn:
        return super()._truth_to_draw(batch, index)._replace(masks=batch["masks"][index].cpu().numpy())

    def _masks_to_draw(self, found: Any, batch: Batch | None = None, index: int = 0) -> NDArray[np.uint8]:
        masks = decode_runs(found.runs, *found.size)
        if batch is None or "matrix" not in batch:
            return masks
        height, width = batch.image(index).shape[-2:]
        return warp_mask(masks, invert_affine(batch["matrix"][index].cpu().numpy()), height, width)


def id_divisor(num_classes: int) -> int:
    """What classes are multiplied by in ids of 16 bits: 1000 for up to 64, 256 for up to 255, less for more."""
    return next((each for each in _DIVISORS if (num_classes + 1) * each <= _NUM_IDS), _NUM_IDS // (num_classes + 1))


def encode_instances(found: Instances, batch: Batch, index: int) -> EncodedInstances:
    """What is detected in an image of a batch, in pixels of the image as it was read."""
    height, width = batch.image(index).shape[-2:]
    matrix, size = np.eye(2, 3), (height, width)
    if "matrix" in batch:
        matrix = batch["matrix"][index].cpu().double().numpy()
        truth = TRUTHS["masks"]
        size = tuple(batch[truth][index].shape[-2:] if truth in batch else batch["size"][index].tolist())
    boxes, masks = to_original(found.boxes, batch, index), found.masks.detach().cpu().float()
    regions = found.boxes.detach().cpu().double()
    around = boxes.detach().cpu().double()
    if not found.in_boxes:
        regions = torch.tensor([[0.0, 0, width, height]], dtype=torch.float64).expand(len(masks), 4)
        around = torch.tensor([[0.0, 0, size[1], size[0]]], dtype=torch.float64).expand(len(masks), 4)
    back = torch.from_numpy(invert_affine(matrix))
    runs = [paste_mask(*each, back, size) for each in zip(masks, regions, around.tolist(), strict=True)]
    return EncodedInstances(boxes, found.scores, found.labels, runs, size)


def paste_mask(mask: Tensor, region: Tensor, around: Sequence[float], back: Tensor, size: tuple[int, int]) -> bytes:
    """The run lengths of what is at least 0.5 of a mask [h, w] that spans a region of the model's image.

    `around` is a box that holds it in an image of height and width `size`, from whose pixels `back` [2, 3] leads to the
    model's.
    """
    left, top = (max(0, math.floor(edge)) for edge in around[:2])
    right, bottom = (min(limit, math.ceil(edge)) for edge, limit in zip(around[2:], size[::-1], strict=True))
    whole = np.zeros(size, np.uint8)
    if right > left and bottom > top:
        down, across = torch.meshgrid(
            torch.arange(top, bottom, dtype=torch.float64) + 0.5,
            torch.arange(left, right, dtype=torch.float64) + 0.5,
            indexing="ij",
        )
        points = torch.stack([across, down], -1) @ back[:, :2].T + back[:, 2]
        places = 2 * (points - region[:2]) / (region[2:] - region[:2]).clamp(min=1e-6) - 1
        grid = places.float()[None]
        values = F.grid_sample(mask[None, None], grid, padding_mode="border", align_corners=False)[0, 0]
        inside = (values >= 0.5) & (places.abs() <= 1).all(-1)
        whole[top:bottom, left:right] = inside.numpy()
    return pack_masks(whole[None])[0]
