"""Detectors on padded images: nothing is learned from the padding or found in it, and torchvision agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.models.detector import Detections, Target
from paceline.models.fcos import FCOS
from paceline.models.torchvision_detection import TorchvisionDetector, build_detection, sorted_detections

TARGETS: list[Target] = [
    {"boxes": torch.tensor([[10.0, 10, 60, 70], [50, 30, 120, 100]]), "labels": torch.tensor([0, 2])},
    {"boxes": torch.tensor([[20.0, 20, 90, 180]]), "labels": torch.tensor([1])},
]


def images_of(sizes: list[tuple[int, int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, *size, generator=generator) for size in sizes]


def pad(images: list[Tensor]) -> Tensor:
    padded = torch.zeros(len(images), 3, *(max(each.shape[axis] for each in images) for axis in (1, 2)))
    for place, image in zip(padded, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    return padded


def constant_heads(detector: nn.Module) -> None:
    """Let the last layers of heads give their bias everywhere, so that only the number of cells matters."""
    for name, module in detector.named_modules():
        if isinstance(module, nn.Conv2d) and ("head" in name) and module.bias is not None:
            nn.init.zeros_(module.weight)


@pytest.fixture(scope="module")
def fcos() -> FCOS:
    torch.manual_seed(0)
    return FCOS(3, backbone="timm/lcnet_035", width=16, depth=1).eval()


@pytest.mark.parametrize("sizes", [[(100, 64), (65, 129)], [(33, 31), (32, 32), (97, 200)]])
def test_an_image_has_the_cells_that_it_would_have_alone(fcos: FCOS, sizes: list[tuple[int, int]]) -> None:
    images = images_of(sizes)
    with torch.no_grad():
        logits, _, _ = fcos._predict(pad(images), sizes)
        alone = [fcos._predict(image[None], None)[0].shape[1] for image in images]
    assert (logits[..., 0] != -100).sum(1).tolist() == alone


def test_fcos_loses_nothing_to_the_padding_and_finds_nothing_there() -> None:
    torch.manual_seed(0)
    detector, sizes = (
        FCOS(3, backbone="timm/lcnet_035", width=16, depth=1, score_thresh=0.0).eval(),
        [(128, 160), (200, 96)],
    )
    constant_heads(detector)
    images = images_of(sizes)
    together = detector(pad(images), TARGETS, image_sizes=sizes)
    alone = [detector(image[None], [target]) for image, target in zip(images, TARGETS, strict=True)]
    assert isinstance(together, dict)
    for name, (total, count) in together.items():
        assert count.item() == pytest.approx(sum(each[name][1].item() for each in alone))
        assert total.item() == pytest.approx(sum(each[name][0].item() for each in alone), rel=1e-5)
    found: Any = detector(pad(images), image_sizes=sizes)
    for each, (height, width) in zip(found, sizes, strict=True):
        assert len(each.boxes) > 0
        assert each.boxes[:, ::2].max() <= width
        assert each.boxes[:, 1::2].max() <= height


NAMES = ["fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn"]


@pytest.fixture(scope="module", params=NAMES)
def detector(request: pytest.FixtureRequest) -> TorchvisionDetector:
    torch.manual_seed(0)
    return build_detection(request.param, num_classes=3, in_channels=3, score_thresh=0.0, detections_per_img=20)


def test_images_that_torchvision_pads_to_one_size_anyway_are_detected_as_by_torchvision(
    detector: TorchvisionDetector,
) -> None:
    from torchvision.models.detection.transform import GeneralizedRCNNTransform

    sizes = [(100, 128), (128, 99)]
    images = images_of(sizes)
    with torch.no_grad():
        found: Any = detector.eval()(pad(images), image_sizes=sizes)
        kept = detector.detector.transform
        detector.detector.transform = GeneralizedRCNNTransform(1, 1, [0.0] * 3, [1.0] * 3, _skip_resize=True)
        try:
            detector._sizes = None
            expected = [sorted_detections(each, detector._first_label) for each in detector.detector(images)]
        finally:
            detector.detector.transform = kept
    for each, other in zip(found, expected, strict=True):
        assert isinstance(each, Detections)
        assert all(torch.equal(one, two) for one, two in zip(each, other, strict=True))


def test_what_was_padded_before_does_not_matter(detector: TorchvisionDetector) -> None:
    images = images_of([(96, 96)])
    with torch.no_grad():
        before: Any = detector.eval()(pad(images))
        detector(pad(images_of([(96, 64), (32, 96)])), image_sizes=[(96, 64), (32, 96)])
        after: Any = detector(pad(images))
    assert all(torch.equal(one, two) for one, two in zip(before[0], after[0], strict=True))


@pytest.mark.parametrize("name", ["fcos_resnet50_fpn", "retinanet_resnet50_fpn"])
def test_classes_in_the_padding_count_nothing(name: str) -> None:
    """The sides are multiples of 128, by which torchvision spaces the anchors of every level alike."""
    torch.manual_seed(0)
    detector, sizes = build_detection(name, 3, 3, score_thresh=0.0), [(128, 256), (256, 128)]
    constant_heads(detector.detector)
    images = images_of(sizes)
    detector.train()
    together = detector(pad(images), TARGETS, image_sizes=sizes)
    alone = [detector(image[None], [target]) for image, target in zip(images, TARGETS, strict=True)]
    assert isinstance(together, dict)
    for loss, (total, count) in together.items():
        assert count.item() == sum(each[loss][1].item() for each in alone)
        assert total.item() == pytest.approx(sum(each[loss][0].item() for each in alone), rel=1e-4)
    with torch.no_grad():
        found: Any = detector.eval()(pad(images), image_sizes=sizes)
    for each, (height, width) in zip(found, sizes, strict=True):
        inside = (each.boxes[:, 0] < width) & (each.boxes[:, 1] < height)
        assert inside[each.scores > 0].all()


def test_no_anchor_in_the_padding_is_sampled_or_proposed() -> None:
    torch.manual_seed(0)
    detector, sizes = build_detection(NAMES[0], 3, 3), [(128, 256), (256, 128)]
    rpn, seen = detector.detector.rpn, list[list[Tensor]]()
    sampler = rpn.fg_bg_sampler

    def watched(labels: list[Tensor]) -> Any:
        seen.append([each.clone() for each in labels])
        return sampler(labels)

    rpn.fg_bg_sampler = watched
    images = images_of(sizes)
    detector.train()
    parts = detector(pad(images), TARGETS, image_sizes=sizes)
    for image, target in zip(images, TARGETS, strict=True):
        detector(image[None], [target])
    assert isinstance(parts, dict)
    padded, alone = seen[0], [each[0] for each in seen[1:]]
    num_between = [(each == -1).sum().item() for each in alone]  # neither objects nor background
    assert [len(each) for each in padded] == [2 * len(alone[0])] * 2
    assert [(each == -1).sum().item() for each in padded] == [
        number + len(own) for number, own in zip(num_between, alone, strict=True)
    ]
    assert [(each == 1).sum().item() for each in padded] == [(own == 1).sum().item() for own in alone]
