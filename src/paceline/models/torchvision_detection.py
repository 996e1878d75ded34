"""torchvision's detectors, Faster and Mask R-CNN, RetinaNet, FCOS, SSD and SSDlite, under the contract of all.

Their losses are divided by what each of them counts: images (RetinaNet), positive anchors (SSD, FCOS), or sampled
anchors, proposals and positive proposals (Faster and Mask R-CNN). The counts are recorded where torchvision makes them,
so that a step over several micro-batches or processes divides by the count of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count, Positive, Share
from paceline.core.errors import ArgumentError
from paceline.core.registry import Library, register
from paceline.core.torchvision_ops import import_torchvision
from paceline.core.world import constant, to_float64
from paceline.models.detector import (
    ABSENT,
    Detections,
    ImageSizes,
    Instances,
    KeypointDetections,
    LossParts,
    Target,
    cells_inside,
)
from paceline.models.zoo import LibraryArgs, build_torchvision, torchvision_models

_PREFIXES = ("fasterrcnn_", "maskrcnn_", "keypointrcnn_", "fcos_", "retinanet_", "ssd300_", "ssdlite320_")
_NAMES = partial(torchvision_models, *_PREFIXES)
_IGNORED = -1.0  # the label of an anchor that torchvision does not sample
_PROPOSALS_AT_ONCE = 32
_TWO_STAGES = ("fasterrcnn", "maskrcnn", "keypointrcnn")
_HEATMAP = 56  # the side of Keypoint R-CNN's heatmaps
_Sizes = Annotated[Sequence[Sequence[Positive]], Field(min_length=1)]


@register.model("torchvision/detection/", library=Library("torchvision", _NAMES))
def build_detection(
    name: str,
    num_classes: int,
    in_channels: int,
    num_keypoints: int = 0,
    score_thresh: Annotated[Share, Field(description="Detections with lower scores are left out.")] = 0.05,
    nms_thresh: Annotated[Share, Field(description="The IoU from which the better of two boxes is kept.")] = 0.5,
    detections_per_img: Count = 100,
    anchor_sizes: Annotated[_Sizes | None, Field(description="Of each level; SSD: shares of the image.")] = None,
    anchor_ratios: Annotated[_Sizes | None, Field(description="Height by width of each level's anchors.")] = None,
    frozen_batch_norm: Annotated[
        bool, Field(description="The backbone's BatchNorm layers are fixed functions of their weights, in less memory.")
    ] = False,
    args: LibraryArgs | None = None,
) -> TorchvisionDetector:
    """A torchvision detector; published weights are loaded with `weights: {file: …, into: detector}`."""
    given: dict[str, Any] = {**(args or {})}
    prefix = "box_" if name.startswith(_TWO_STAGES) else ""
    given |= {f"{prefix}score_thresh": score_thresh, f"{prefix}nms_thresh": nms_thresh}
    given[f"{prefix}detections_per_img"] = detections_per_img
    if name.startswith("keypointrcnn"):
        if not num_keypoints:
            raise ValueError(f"{name}: the data has no keypoints; use a data set with keypoints")
        given["num_keypoints"] = num_keypoints
    if anchor_sizes or anchor_ratios:
        given |= _anchors(name, anchor_sizes, anchor_ratios)
    first_label = 1 if name.startswith((*_TWO_STAGES, "ssd")) else 0  # those have a class for the background
    detector: Any = build_torchvision(name, num_classes + first_label, 3, given)
    if in_channels != 3:
        raise ValueError(f"{name} takes images of 3 channels, the data has {in_channels}")
    if frozen_batch_norm:
        _freeze_batch_norm(detector.backbone)
    selection = {"score_thresh": score_thresh, "nms_thresh": nms_thresh, "detections_per_img": detections_per_img}
    return TorchvisionDetector(detector, first_label, selection)


class PaddedDetector(nn.Module):
    """What detectors of torchvision's parts share: they see no object in the padding of images that differ in size."""

    pads_images = True
    """Whether images of different sizes may be padded."""

    def __init__(self, size_divisible: int) -> None:
        super().__init__()
        self.image_list = UnchangedImages(size_divisible)
        self._sizes: ImageSizes | None = None
        """The sizes of the images of the last forward pass, if any was padded."""
        self._is_inside: Tensor | None = None
        """Which anchors of the last forward pass are no padding, bool [N, A]; None if all are."""

    def without_padding(self, images: Tensor, image_sizes: ImageSizes | None) -> list[Tensor]:
        """The images of a forward pass, one by one."""
        self._sizes, each = image_sizes, list(images.unbind())
        if image_sizes is None:
            return each
        return [image[:, :height, :width] for image, (height, width) in zip(each, image_sizes, strict=True)]

    def ignore_padding(self, rpn: Any) -> None:
        """Have a region proposal network propose nothing in the padding, and learn nothing from it."""
        rpn.head.register_forward_hook(self._hide_objects)
        rpn.assign_targets_to_anchors = partial(self._assign_inside, rpn.assign_targets_to_anchors)

    def _hide_objects(self, _: nn.Module, given: Any, outputs: Any) -> Any:
        """The outputs of a region proposal head, with no object in the padding."""
        self._is_inside = None
        if self._sizes is None:
            return outputs
        objects, boxes = outputs
        pairs = list(zip(objects, self._cells_inside(given[0]), strict=True))
        self._is_inside = torch.cat([cells.flatten(1).repeat_interleave(each.shape[1], 1) for each, cells in pairs], 1)
        return [each.masked_fill(~cells[:, None], ABSENT) for each, cells in pairs], boxes

    def _assign_inside(self, assign: Callable[..., Any], *given: Any) -> Any:
        """The label of each anchor and the box to match; anchors in the padding are left out of the loss."""
        labels, boxes = assign(*given)
        if self._is_inside is not None:
            labels = [each.masked_fill(~inside, _IGNORED) for each, inside in zip(labels, self._is_inside, strict=True)]
        return labels, boxes

    def _cells_inside(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Which cells of feature maps each image would have alone, bool [N, H, W] of each level."""
        assert self._sizes is not None
        sizes = [self.image_list.padded(size) for size in self._sizes]
        shapes = [each.shape[-2:] for each in maps]
        steps = [[side // number for side, number in zip(self.image_list.size, shape, strict=True)] for shape in shapes]
        return [cells_inside(sizes, *each, maps[0].device) for each in zip(shapes, steps, strict=True)]


class TorchvisionDetector(PaddedDetector):
    """A detector of torchvision that takes images as they are: the recipe's transforms resize and normalize them."""

    def __init__(self, detector: Any, first_label: int, selection: Mapping[str, Any]) -> None:
        super().__init__(detector.transform.size_divisible)
        self.detector = detector
        self._first_label = first_label
        self.selection = selection
        """How the detections of an image are selected."""
        detector.transform = self.image_list
        self.pads_images = type(detector).__name__ != "SSD"
        """Whether images of different sizes may be padded; SSD's anchors are shares of the padded image."""
        self._counts: dict[str, Tensor | float] = {}
        """What the losses of the last forward pass are divided by."""
        kind = type(detector).__name__
        self._divisors = record_counts(detector, kind, self._counts)
        self.loss_names = tuple(self._divisors)
        if set(self._divisors.values()) == {"images"}:
            self.count = lambda images, targets: dict.fromkeys(self._divisors, len(images))
        self.predicts_masks, self.predicts_keypoints = kind == "MaskRCNN", kind == "KeypointRCNN"
        if hasattr(detector, "rpn"):
            self.ignore_padding(detector.rpn)
        elif self.pads_images:
            detector.head.register_forward_hook(self._hide_classes)

    def forward(
        self, images: Tensor, targets: Sequence[Target] | None = None, image_sizes: ImageSizes | None = None
    ) -> LossParts | list[Any]:
        """The losses of images [N, 3, H, W] beside their targets; without targets, what is detected in each image."""
        each = self.without_padding(images, image_sizes)
        if targets is None:
            return [sorted_detections(found, self._first_label) for found in self.detector(each)]
        self._counts["images"] = len(images)
        dtype = torch.float32 if hasattr(self.detector, "rpn") else images.dtype
        losses = self.detector(each, torchvision_targets(targets, dtype, self._first_label))
        return loss_parts(losses, self._divisors, self._counts)

    def _hide_classes(self, _: nn.Module, given: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of a head, with no class in the padding."""
        if self._sizes is None:
            return outputs
        logits, cells = outputs["cls_logits"], torch.cat([each.flatten(1) for each in self._cells_inside(given[0])], 1)
        inside = cells.repeat_interleave(logits.shape[1] // cells.shape[1], 1)
        return {**outputs, "cls_logits": logits.masked_fill(~inside[..., None], ABSENT)}


def torchvision_targets(targets: Sequence[Target], dtype: torch.dtype, first_label: int) -> list[dict[str, Tensor]]:
    """Targets as torchvision takes them; the classes count from `first_label`."""
    return [
        {**each, "boxes": each["boxes"].to(dtype), "labels": each["labels"] + first_label}  # type: ignore[dict-item]
        for each in targets
    ]


def sorted_detections(found: Mapping[str, Tensor], first_label: int) -> Any:
    """What torchvision has detected in an image, the most confident first; with masks or keypoints if it has any."""
    order = found["scores"].sort(descending=True, stable=True).indices
    detections = Detections(found["boxes"][order], found["scores"][order], found["labels"][order] - first_label)
    if "keypoints" in found:
        places, scores = found["keypoints"][order, :, :2], found["keypoints_scores"][order]
        return KeypointDetections(*detections, places, scores)
    return Instances(*detections, found["masks"][order, 0], in_boxes=True) if "masks" in found else detections


def loss_parts(
    losses: Mapping[str, Tensor], divisors: Mapping[str, str], counts: Mapping[str, Tensor | float]
) -> LossParts:
    """Each loss as a sum and a count, where torchvision has divided it by one of `counts`."""
    parts: LossParts = {}
    for name, kind in divisors.items():
        given = counts[kind]
        on_device = given if isinstance(given, Tensor) else losses[name].new_full((), given)
        count = to_float64(on_device)
        # torchvision has divided by at least 1; a micro-batch without any must not count as one.
        parts[name] = (losses[name] * count.clamp(min=1).to(losses[name]), count)
    return parts


class UnchangedImages(nn.Module):
    """Takes the place of torchvision's transform: images are only padded, to one size and multiples of a number."""

    def __init__(self, size_divisible: int) -> None:
        super().__init__()
        self._size_divisible = size_divisible
        self.size = (0, 0)
        """Height and width of the padded images of the last forward pass."""

    def forward(self, images: Sequence[Tensor] | Tensor, targets: Any) -> tuple[Any, Any]:
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        height, width = self.size = self.padded(map(max, zip(*sizes, strict=True)))
        if len(set(sizes)) == 1:
            padded = F.pad(torch.stack(list(images)), (0, width - sizes[0][1], 0, height - sizes[0][0]))
        else:
            pads = [(0, width - columns, 0, height - rows) for rows, columns in sizes]
            padded = torch.stack([F.pad(each, pad) for each, pad in zip(images, pads, strict=True)])
        return import_torchvision().models.detection.image_list.ImageList(padded, sizes), targets

    def padded(self, size: Iterable[int]) -> tuple[int, int]:
        """Height and width as multiples of the number."""
        height, width = (side + -side % self._size_divisible for side in size)
        return height, width

    def postprocess(self, found: Any, sizes: Any, original_sizes: Any) -> Any:
        return found


def record_counts(detector: Any, kind: str, counts: dict[str, Tensor | float]) -> dict[str, str]:
    """Have `counts` filled in every forward pass of a torchvision detector; what each loss is divided by."""
    match kind:
        case "RetinaNet":
            return {"classification": "images", "bbox_regression": "images"}
        case "SSD":
            detector.forward = partial(_ssd_forward, detector, counts)
            return {"bbox_regression": "positives", "classification": "positives"}
        case "FCOS":
            _watch(detector.head, "compute_loss", counts, "positives", lambda _, given: _num_positive(given[-1]))
            return {"classification": "positives", "bbox_regression": "positives", "bbox_ctrness": "positives"}
        case "FasterRCNN" | "MaskRCNN" | "KeypointRCNN":
            _compute_boxes_in_float32(detector)
            _watch(detector.rpn, "fg_bg_sampler", counts, "anchors", lambda drawn, _: _num_drawn(drawn))
            heads = detector.roi_heads
            _watch(heads, "select_training_samples", counts, "proposals", lambda chosen, _: sum(map(len, chosen[0])))
            _limit_samples(heads)
            of_anchors = dict.fromkeys(("loss_objectness", "loss_rpn_box_reg"), "anchors")
            divisors = of_anchors | dict.fromkeys(("loss_classifier", "loss_box_reg"), "proposals")
            if kind == "FasterRCNN":
                return divisors
            if kind == "KeypointRCNN":
                _watch(heads, "select_training_samples", counts, "keypoints", _num_keypoints)
                return divisors | {"loss_keypoint": "keypoints"}
            use_mask_targets()
            # The mean over the pixels of all masks is divided by their number: all have as many pixels.
            _watch(heads, "select_training_samples", counts, "positives", lambda chosen, _: _num_foreground(chosen[2]))
            return divisors | {"loss_mask": "positives"}
    raise ValueError(f"{kind} is not a known detector")


def _watch(
    owner: Any,
    method: str,
    counts: dict[str, Tensor | float],
    name: str,
    count: Callable[[Any, tuple[Any, ...]], Tensor | float],
) -> None:
    """Have each call of a method leave a count of its result and arguments."""
    original = getattr(owner, method)

    def watched(*args: Any) -> Any:
        result = original(*args)
        counts[name] = count(result, args)
        return result

    setattr(owner, method, watched)


def _limit_samples(heads: Any) -> None:
    """Have a plan, whose fake tensors select every proposal, know that no more are sampled than there may be."""
    subsample, most = heads.subsample, heads.fg_bg_sampler.batch_size_per_image
    heads.subsample = lambda labels: [chosen[:most] for chosen in subsample(labels)]


def _compute_boxes_in_float32(detector: Any) -> None:
    """Have a two-stage detector compute boxes in float32, whatever the precision of its layers: bfloat16 has no 257."""
    rpn, heads = detector.rpn, detector.roi_heads
    predictors = (heads.box_predictor, heads.mask_predictor, heads.keypoint_predictor)
    for module in (rpn.head, rpn.anchor_generator, *predictors):
        if module is not None:
            module.register_forward_hook(lambda _, args, output: _as_float32(output))
    for name in ("box_roi_pool", "mask_roi_pool", "keypoint_roi_pool"):
        if getattr(heads, name) is not None:
            setattr(heads, name, _Float32Pool(getattr(heads, name)))


class _Float32Pool(nn.Module):
    """Pools features with boxes in float32; the result has the features' dtype."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, maps: Mapping[str, Tensor], boxes: list[Tensor], image_sizes: Any) -> Tensor:
        dtype = next(iter(maps.values())).dtype
        pooled: Tensor = self.pool({name: each.float() for name, each in maps.items()}, boxes, image_sizes)
        return pooled.to(dtype)


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else type(value)(map(_as_float32, value))


def _num_positive(matched: Sequence[Tensor]) -> Tensor:
    return torch.stack([(indices >= 0).sum() for indices in matched]).sum()


def _num_foreground(labels: Sequence[Tensor]) -> Tensor:
    return torch.stack([(each > 0).sum() for each in labels]).sum()


def _num_keypoints(chosen: tuple[Any, ...], given: tuple[Any, ...]) -> Tensor:
    """How many labeled keypoints lie in the positive proposals that are to predict them."""
    to_heatmap = import_torchvision().models.detection.roi_heads.keypoints_to_heatmap
    counts = []
    for proposals, matched, labels, target in zip(*chosen[:3], given[1], strict=True):
        positive = torch.where(labels > 0)[0]
        places = target["keypoints"][matched[positive]]
        counts.append(to_heatmap(places, proposals[positive], _HEATMAP)[1].sum())
    return torch.stack(counts).sum()


def _num_drawn(drawn: tuple[Sequence[Tensor], Sequence[Tensor]]) -> Tensor:
    return torch.stack([mask.sum() for masks in drawn for mask in masks]).sum()


def use_mask_targets() -> None:
    """Have torchvision compute the targets of masks by `mask_targets`."""
    import_torchvision().models.detection.roi_heads.project_masks_on_boxes = mask_targets


def mask_targets(masks: Tensor, boxes: Tensor, matched: Tensor, side: int) -> Tensor:
    """The masks [K, H, W] that proposals [P, 4] are matched with, inside each proposal: [P, side, side], from 0 to 1.

    These are the numbers of torchvision's RoI Align. Where that runs in Python, as it does on a GPU that is to be
    reproducible, it takes tens of gigabytes for them. A pixel's weight is a product of one down and one across, so
    two small matrix products do.
    """
    height, width = masks.shape[-2:]
    with torch.autocast(boxes.device.type, enabled=False):
        corners = boxes.float()
        down = _bin_weights(corners[:, 1], corners[:, 3], height, side)  # [P, side, H]
        across = _bin_weights(corners[:, 0], corners[:, 2], width, side)
        steps = [slice(start, start + _PROPOSALS_AT_ONCE) for start in range(0, max(1, len(boxes)), _PROPOSALS_AT_ONCE)]
        cropped = [down[step] @ masks[matched[step]].to(down) @ across[step].mT for step in steps]
        return torch.cat(cropped).to(boxes.dtype)


def _bin_weights(start: Tensor, end: Tensor, length: int, side: int) -> Tensor:
    """How much each of `length` pixels counts in each of `side` bins from `start` [P] to `end`, [P, side, length]."""
    extent = (end - start).clamp(min=1)
    num_samples = (extent / side).ceil()
    pixels = torch.arange(length, device=start.device)
    bins = start[:, None] + torch.arange(side, device=start.device) * (extent / side)[:, None]
    total = start.new_zeros(len(start), side, length)
    for number in range(int(num_samples.max()) if len(start) else 0):
        offset = (number + 0.5) * extent / side / num_samples
        places = (bins + offset[:, None]).clamp(0, length - 1)
        weights = (1 - (places[..., None] - pixels).abs()).clamp(min=0)
        total += weights * (number < num_samples)[:, None, None]
    return total / num_samples[:, None, None]


def _freeze_batch_norm(backbone: nn.Module) -> None:
    """Put torchvision's FrozenBatchNorm2d, as its builders do beside pretrained weights, in place of BatchNorm."""
    frozen = import_torchvision().ops.FrozenBatchNorm2d
    for name, layer in list(backbone.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            backbone.set_submodule(name, frozen(layer.num_features, layer.eps))


def _anchors(name: str, sizes: _Sizes | None, ratios: _Sizes | None) -> dict[str, Any]:
    """The arguments of torchvision's builder for anchors of these sizes and aspect ratios."""
    utils = import_torchvision().models.detection.anchor_utils
    if name.startswith("ssd"):
        if ratios is None:
            raise ArgumentError("anchor_ratios", "expected the ratios of each level beside anchor_sizes")
        return {"anchor_generator": utils.DefaultBoxGenerator([list(each) for each in ratios], scales=_flat(sizes))}
    if sizes is None:
        raise ArgumentError("anchor_sizes", "expected the sizes of each level beside anchor_ratios")
    by_level = tuple(tuple(each) for each in ratios) if ratios else ((0.5, 1.0, 2.0),) * len(sizes)
    generator = utils.AnchorGenerator(tuple(tuple(each) for each in sizes), by_level)
    return {"rpn_anchor_generator" if name.startswith(_TWO_STAGES) else "anchor_generator": generator}


def _flat(sizes: _Sizes | None) -> list[float] | None:
    return [size for level in sizes for size in level] if sizes else None


def _ssd_forward(detector: Any, counts: dict[str, Tensor | float], images: Any, targets: Any = None) -> Any:
    """What `SSD.forward` gives: with targets, its two losses, whose divisor goes to counts["positives"].

    torchvision selects matched anchors and hard negatives, and only the device knows how many there are. Here every
    anchor is computed, and those that are not selected count 0, so that a GPU never waits for Python. The sums are the
    same, but for images so crowded that they have too few negatives: torchvision then counts positives twice. Boxes
    without area match nothing.
    """
    if targets is None:
        return type(detector).forward(detector, images)
    batch, _ = detector.transform(images, None)
    features = detector.backbone(batch.tensors)
    maps = [features] if isinstance(features, Tensor) else list(features.values())
    outputs = detector.head(maps)
    anchors = _ssd_anchors(detector, batch, maps).expand(len(images), -1, -1)  # [N, A, 4]
    boxes, labels = _match(targets, anchors, detector.proposal_matcher.high_threshold)
    positive = labels > 0
    count = counts["positives"] = positive.sum()
    wanted = _encode(boxes, anchors) * constant(detector.box_coder.weights, boxes.device, boxes.dtype)
    distances = F.smooth_l1_loss(outputs["bbox_regression"], wanted, reduction="none").sum(-1)
    errors = F.cross_entropy(outputs["cls_logits"].transpose(1, 2), labels, reduction="none")
    selected = positive | _hard_negatives(errors.detach(), positive, detector.neg_to_pos_ratio)
    divisor = count.clamp(min=1)
    return {
        "bbox_regression": distances.where(positive, 0).sum() / divisor,
        "classification": errors.where(selected, 0).sum() / divisor,
    }


def _ssd_anchors(detector: Any, batch: Any, maps: Sequence[Tensor]) -> Tensor:
    """The anchors of an image [A, 4], which torchvision makes on the host and copies when the device is idle."""
    batch_on_host, *on_host = (torch.empty(0, *each.shape[-2:], dtype=maps[0].dtype) for each in (batch.tensors, *maps))
    [anchors] = detector.anchor_generator(type(batch)(batch_on_host, batch.image_sizes[:1]), on_host)
    moved: Tensor = anchors.to(maps[0].device, non_blocking=True)
    return moved


def _match(targets: Sequence[dict[str, Tensor]], anchors: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The box [N, A, 4] and the label [N, A] of each anchor; the background has label 0 and the anchor itself.

    An anchor takes the box that overlaps it most, if by at least `threshold`; and each box has its best anchor.
    """
    all_boxes, all_labels = [], []
    for target, own in zip(targets, anchors, strict=True):
        boxes, labels = target["boxes"].to(own), target["labels"]
        if not len(boxes):
            boxes, labels = own[:1], labels.new_zeros(1)
        labels = labels.where((boxes[:, 2:] > boxes[:, :2]).all(1), 0)
        overlaps = import_torchvision().ops.box_iou(boxes, own)  # [K, A]
        overlap, index = overlaps.max(0)
        is_matched = overlap >= threshold
        best_anchors = overlaps.argmax(1)
        index[best_anchors] = torch.arange(len(boxes), device=index.device)
        is_matched.index_fill_(0, best_anchors, True)
        all_labels.append(labels[index].where(is_matched, 0))
        all_boxes.append(boxes[index].where(all_labels[-1][:, None] > 0, own))
    return torch.stack(all_boxes), torch.stack(all_labels)


def _encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Boxes [..., 4] as seen from their anchors: how far the centers are apart, and the logarithms of the ratios."""
    (centers, sizes), (from_centers, from_sizes) = (
        ((corners[..., :2] + corners[..., 2:]) / 2, corners[..., 2:] - corners[..., :2]) for corners in (boxes, anchors)
    )
    return torch.cat([(centers - from_centers) / from_sizes, (sizes / from_sizes).log()], -1)


def _hard_negatives(errors: Tensor, positive: Tensor, ratio: float) -> Tensor:
    """The negative anchors [N, A] of the largest errors: in each image, `ratio` for each positive one."""
    hardest_first = errors.masked_fill(positive, -torch.inf).argsort(dim=1, descending=True, stable=True)
    ranks = hardest_first.argsort(1)
    return (ranks < ratio * positive.sum(1, keepdim=True)) & ~positive
