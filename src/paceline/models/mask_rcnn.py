"""Mask R-CNN on any image backbone of timm or torchvision: torchvision's two stages behind a feature pyramid.

The first stage proposes boxes, the second classifies and refines a sample of them, and predicts a mask inside each
(He et al., "Mask R-CNN", 2017). With a small backbone it trains on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count, Positive, Share
from paceline.core.registry import register
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.detector import ImageSizes, LossParts, Target
from paceline.models.encoder_decoder import FPNLevel, build_encoder
from paceline.models.torchvision_detection import (
    PaddedDetector,
    loss_parts,
    record_counts,
    sorted_detections,
    torchvision_targets,
)
from paceline.models.zoo import BackboneName, LibraryArgs

_BOX_SIZE, _MASK_SIZE = 7, 14  # what proposals are pooled to; masks have twice as many pixels a side
_MASK_DEPTH = 4
_RATIOS = (0.5, 1.0, 2.0)


@register.model("mask_rcnn")
class MaskRCNN(PaddedDetector):
    """Mask R-CNN with a feature pyramid on any timm or torchvision backbone."""

    predicts_masks = True

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        backbone: BackboneName = "timm/mobilenetv2_100",
        width: Annotated[Count, Field(description="Channels of the pyramid and the mask head.")] = 96,
        box_width: Annotated[Count, Field(description="Features of the head that classifies proposals.")] = 256,
        min_stride: Annotated[Count, Field(description="The stride of the finest feature map that is used.")] = 4,
        anchor_scale: Annotated[Positive, Field(description="The side of anchors, in strides of their map.")] = 8.0,
        rpn_post_nms_top_n: Annotated[Count, Field(description="Proposals of an image.")] = 500,
        box_batch_size_per_image: Annotated[Count, Field(description="Proposals that are learned from.")] = 128,
        score_thresh: Share = 0.05,
        nms_thresh: Share = 0.5,
        detections_per_img: Count = 100,
        backbone_args: LibraryArgs | None = None,
    ) -> None:
        encoder = build_encoder(backbone, in_channels, backbone_args or {})
        used = [index for index, stride in enumerate(encoder.strides) if stride >= min_stride]
        if not used:
            raise ValueError(f"backbone {backbone!r} has no feature map of stride {min_stride} or more")
        strides = [encoder.strides[index] for index in used]
        super().__init__(size_divisible=strides[-1])
        self.backbone = encoder.module
        self.pyramid = nn.ModuleList(FPNLevel(encoder.channels[index], width) for index in used)
        self._first_level = used[0]
        self.selection = {"score_thresh": score_thresh, "nms_thresh": nms_thresh}
        self.selection["detections_per_img"] = detections_per_img
        """How the detections of an image are selected."""
        top = {
            f"rpn_{when}_nms_top_n_{mode}": rpn_post_nms_top_n for when in ("pre", "post") for mode in ("train", "test")
        }
        stages = _two_stages(
            num_classes + 1,
            width,
            box_width,
            [anchor_scale * stride for stride in strides],
            top | {f"box_{name}": value for name, value in self.selection.items()},
            box_batch_size_per_image=box_batch_size_per_image,
        )
        self.rpn, self.roi_heads = stages.rpn, stages.roi_heads
        self._counts: dict[str, Tensor | float] = {}
        self._divisors = record_counts(self, "MaskRCNN", self._counts)
        self.loss_names = tuple(self._divisors)
        self.ignore_padding(self.rpn)

    def forward(
        self,
        images: Tensor,
        targets: Sequence[Target] | None = None,
        image_sizes: ImageSizes | None = None,
    ) -> LossParts | list[Any]:
        """The losses of images [N, C, H, W] beside their targets; without targets, what is detected in each image.

        `image_sizes` are heights and widths of images without the padding on their right and below.
        """
        batch, _ = self.image_list(self.without_padding(images, image_sizes), None)
        maps = self._maps(batch.tensors)
        wanted = None if targets is None else torchvision_targets(targets, torch.float32, first_label=1)
        proposals, rpn_losses = self.rpn(batch, maps, wanted)
        found, losses = self.roi_heads(maps, proposals, batch.image_sizes, wanted)
        if targets is None:
            return [sorted_detections(each, first_label=1) for each in found]
        return loss_parts(rpn_losses | losses, self._divisors, self._counts)

    def _maps(self, images: Tensor) -> dict[str, Tensor]:
        """The levels of the pyramid by name, finest first."""
        features = self.backbone(images)[self._first_level :]
        levels: dict[str, Tensor] = {}
        above: Tensor | None = None
        for index in reversed(range(len(features))):
            above, levels[str(index)] = self.pyramid[index](features[index], above)
        return dict(reversed(levels.items()))


def _two_stages(
    num_classes: int, width: int, box_width: int, anchor_sizes: Sequence[float], args: dict[str, Any], **more: Any
) -> Any:
    """torchvision's Mask R-CNN with heads of these widths, without a backbone."""
    torchvision = import_torchvision()
    detection, pool = torchvision.models.detection, torchvision.ops.MultiScaleRoIAlign
    names = [str(index) for index in range(len(anchor_sizes))]
    backbone = nn.Identity()
    backbone.out_channels = width  # type: ignore[assignment]
    return detection.MaskRCNN(
        backbone,
        rpn_anchor_generator=detection.anchor_utils.AnchorGenerator(
            tuple((size,) for size in anchor_sizes), (_RATIOS,) * len(anchor_sizes)
        ),
        box_roi_pool=pool(names, _BOX_SIZE, 2),
        box_head=detection.faster_rcnn.TwoMLPHead(width * _BOX_SIZE**2, box_width),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(box_width, num_classes),
        mask_roi_pool=pool(names, _MASK_SIZE, 2),
        mask_head=detection.mask_rcnn.MaskRCNNHeads(width, (width,) * _MASK_DEPTH, 1),
        mask_predictor=detection.mask_rcnn.MaskRCNNPredictor(width, width, num_classes),
        **args,
        **more,
    )
