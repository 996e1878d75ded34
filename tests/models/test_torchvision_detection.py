"""torchvision's detectors: their losses as sums and counts, and their detections."""

import pytest
import torch

from paceline.models.detector import Instances, Target
from paceline.models.torchvision_detection import TorchvisionDetector, build_detection

SIZE = 128
NAMES = [
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fcos_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssdlite320_mobilenet_v3_large",
]
MASKS = torch.zeros(2, SIZE, SIZE, dtype=torch.uint8)
MASKS[0, 10:70, 10:60], MASKS[1, 30:100, 50:85] = 1, 1
TARGETS: list[Target] = [
    {"boxes": torch.tensor([[10.0, 10, 60, 70], [50, 30, 120, 100]]), "labels": torch.tensor([0, 2]), "masks": MASKS},
    {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "masks": MASKS[:0]},
]


def images() -> torch.Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=NAMES)
def detector(request: pytest.FixtureRequest) -> TorchvisionDetector:
    torch.manual_seed(0)
    return build_detection(request.param, num_classes=3, in_channels=3)


def test_losses_divided_by_their_counts_are_those_of_torchvision(detector: TorchvisionDetector) -> None:
    detector.train()
    shift = detector._first_label
    own = [{**each, "labels": each["labels"] + shift} for each in TARGETS]
    torch.manual_seed(1)
    expected = type(detector.detector).forward(detector.detector, list(images()), own)
    torch.manual_seed(1)
    parts = detector(images(), TARGETS)
    assert isinstance(parts, dict)
    assert set(parts) == set(detector.loss_names) == set(expected)
    for name, (total, count) in parts.items():
        assert count.item() > 0
        assert (total / count).item() == pytest.approx(expected[name].item(), rel=1e-5)


def test_every_parameter_gets_a_gradient(detector: TorchvisionDetector) -> None:
    parts = detector.train()(images(), TARGETS)
    assert isinstance(parts, dict)
    sum((total for total, _ in parts.values()), torch.zeros(())).backward()
    assert [name for name, each in detector.named_parameters() if each.requires_grad and each.grad is None] == []


def test_detections_are_sorted_and_their_labels_begin_at_0(detector: TorchvisionDetector) -> None:
    with torch.no_grad():
        found = detector.eval()(images())
    assert len(found) == 2
    assert isinstance(found, list)
    for each in found:
        assert each.boxes.shape == (len(each.scores), 4)
        assert isinstance(each, Instances) == detector.predicts_masks
        assert each.scores.tolist() == sorted(each.scores.tolist(), reverse=True)
        assert all(0 <= label < 3 for label in each.labels.tolist())


def test_anchors_are_arguments() -> None:
    built = build_detection(
        "retinanet_resnet50_fpn", 3, 3,
        anchor_sizes=[[16], [32], [64], [128], [256]], anchor_ratios=[[1.0]] * 5, score_thresh=0.2,
    )  # fmt: skip
    assert built.detector.anchor_generator.num_anchors_per_location() == [1] * 5
    assert built.detector.score_thresh == 0.2
