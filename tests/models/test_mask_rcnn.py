"""Mask R-CNN: its losses as sums and counts, against formulas; RoI Align and mask targets, against torchvision's."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.torchvision_ops import import_torchvision
from paceline.models.detector import Instances, Target
from paceline.models.mask_rcnn import MaskRCNN
from paceline.models.torchvision_detection import mask_targets

SIZE = 64


def small(**args: Any) -> MaskRCNN:
    torch.manual_seed(0)
    given = {"width": 16, "box_width": 16, "rpn_post_nms_top_n": 40, "box_batch_size_per_image": 24} | args
    return MaskRCNN(3, backbone="timm/lcnet_035", **given)


def targets() -> list[Target]:
    masks = torch.zeros(2, SIZE, SIZE, dtype=torch.uint8)
    masks[0, 5:35, 5:25], masks[1, 20:60, 30:50] = 1, 1
    boxes = torch.tensor([[5.0, 5, 25, 35], [30, 20, 62, 60]])
    return [
        {"boxes": boxes, "labels": torch.tensor([0, 2]), "masks": masks},
        {"boxes": boxes[:0], "labels": torch.zeros(0, dtype=torch.int64), "masks": masks[:0]},
    ]


def images() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def random_rois(number: int, height: int, width: int) -> Tensor:
    """The number of an image and a box in it, [number, 5]."""
    generator = torch.Generator().manual_seed(1)
    corners = torch.rand(number, 2, generator=generator) * torch.tensor([width, height]) * 0.9
    ends = torch.minimum(corners + torch.rand(number, 2, generator=generator) * width, torch.tensor([width, height]))
    numbers = torch.randint(0, 2, (number, 1), generator=generator).float()
    return torch.cat([numbers, corners, ends], 1)


@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_is_that_of_torchvision(aligned: bool) -> None:
    """Values and gradients; torchvision's own in Python follows its compiled one."""
    import_torchvision()
    module: Any = importlib.import_module("torchvision.ops.roi_align")
    if not hasattr(module._roi_align, "args"):
        pytest.skip("torchvision's compiled operators are here")
    (in_python,) = module._roi_align.args
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for results, function in ((found, module._roi_align), (expected, in_python)):
        features = torch.randn(2, 5, 20, 30, generator=torch.Generator().manual_seed(0)).requires_grad_()
        pooled = function(features, random_rois(40, 80, 120), 0.25, 7, 5, 2, aligned)
        results += [pooled, *torch.autograd.grad(pooled.square().sum(), features)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_targets_of_masks_are_those_of_torchvision() -> None:
    torchvision = import_torchvision()
    masks = (torch.rand(4, 40, 60, generator=torch.Generator().manual_seed(0)) > 0.5).to(torch.uint8)
    boxes, matched = random_rois(50, 40, 60)[:, 1:], torch.arange(50) % 4
    rois = torch.cat([matched[:, None].float(), boxes], 1)
    expected = torchvision.ops.roi_align(masks[:, None].float(), rois, (28, 28), 1.0)[:, 0]
    torch.testing.assert_close(mask_targets(masks, boxes, matched, 28), expected, atol=1e-5, rtol=0)
    assert mask_targets(masks, boxes[:0], matched[:0], 28).shape == (0, 28, 28)


def test_the_mask_loss_is_a_sum_over_positive_proposals() -> None:
    """The cross-entropy of the pixels of each positive proposal's mask, of its class, with what lies in its box."""
    model = small().train()
    seen: dict[str, Any] = {}
    model.roi_heads.mask_predictor.register_forward_hook(lambda _, args, output: seen.update(logits=output))
    select = model.roi_heads.select_training_samples

    def watched(*args: Any) -> Any:
        seen["chosen"] = select(*args)
        return seen["chosen"]

    model.roi_heads.select_training_samples = watched
    parts = model(images(), targets())
    assert isinstance(parts, dict)
    proposals, matched, labels, _ = seen["chosen"]
    wanted, classes = [], []
    for boxes, indices, own, target in zip(proposals, matched, labels, targets(), strict=True):
        positive = own > 0
        classes.append(own[positive])
        if positive.any():
            wanted.append(mask_targets(target["masks"], boxes[positive], indices[positive], 28))
    logits = seen["logits"][torch.arange(len(seen["logits"])), torch.cat(classes)]
    errors = F.binary_cross_entropy_with_logits(logits, torch.cat(wanted), reduction="none").mean((1, 2))
    total, count = parts["loss_mask"]
    assert count.item() == len(errors) > 0
    assert total.item() == pytest.approx(errors.sum().item(), rel=1e-5)
    assert parts["loss_classifier"][1].item() == sum(map(len, proposals))
    assert parts["loss_objectness"][1].item() == 2 * 256


def test_without_objects_masks_count_for_nothing() -> None:
    parts = small().train()(images()[:1], targets()[1:])
    assert isinstance(parts, dict)
    assert [value.item() for value in parts["loss_mask"]] == [0, 0]
    assert sum(total for total, _ in parts.values()).isfinite()


def test_every_parameter_gets_a_gradient() -> None:
    model = small().train()
    parts = model(images(), targets())
    assert isinstance(parts, dict)
    sum((total for total, _ in parts.values()), torch.zeros(())).backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []


def test_images_of_any_size_are_padded_and_boxes_stay_inside() -> None:
    model = small(score_thresh=0.0).eval()
    with torch.no_grad():
        found = model(torch.randn(1, 3, 50, 70))
        inner = model(torch.randn(1, 3, 64, 96), image_sizes=[(50, 70)])
    for (each,) in (found, inner):
        assert isinstance(each, Instances)
        assert each.in_boxes
        assert len(each.boxes) > 0
        assert each.masks.shape == (len(each.boxes), 28, 28)
        assert each.boxes.amin() >= 0
        assert (each.boxes.amax(0) <= torch.tensor([70, 50, 70, 50])).all()
        assert each.scores.tolist() == sorted(each.scores.tolist(), reverse=True)
        assert set(each.labels.tolist()) <= {0, 1, 2}


def test_nothing_is_learned_from_padding() -> None:
    """An image of 8 × 8 has the cells of one of 32 × 32: 8², 4², 2² and 1, with three anchors each."""
    model, empty = small().train(), 2 * targets()[1:]
    counts = []
    for sizes in (None, [(SIZE, SIZE), (8, 8)]):
        parts = model(images(), empty, image_sizes=sizes)
        assert isinstance(parts, dict)
        counts.append(parts["loss_objectness"][1].item())
    assert counts == [2 * 256, 256 + 3 * (64 + 16 + 4 + 1)]


def test_boxes_are_computed_in_float32_whatever_the_layers_are() -> None:
    model = small(score_thresh=0.0).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (found,) = model(images()[:1])
    assert found.boxes.dtype == torch.float32
    assert isinstance(found, Instances)
    assert found.boxes.bfloat16().float().ne(found.boxes).any()


def test_a_backbone_without_a_fine_map_is_refused() -> None:
    with pytest.raises(ValueError, match="no feature map of stride 64"):
        small(min_stride=64)
