"""The simple baseline on backbones of both libraries, and on HRNet's fine map."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.models.simple_baseline import SimpleBaseline

BACKBONES: dict[str, dict[str, Any]] = {
    "torchvision/mobilenet_v2": {"widths": [16, 16, 16]},
    "torchvision/resnet18": {"widths": [16, 8, 8]},
    "timm/lcnet_035": {"widths": [8], "feature_stride": 8},
    "timm/hrnet_w18_small": {"widths": [], "feature_stride": 4},
}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_heatmaps_have_a_quarter_of_the_size(backbone: str) -> None:
    model = SimpleBaseline(14, backbone=backbone, **BACKBONES[backbone]).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 64, 96)).shape == (2, 14, 16, 24)


def test_the_published_model_has_its_parameters() -> None:
    """Xiao et al. report 34.0 M for ResNet-50 with three deconvolutions of 256 channels and 17 keypoints."""
    model = SimpleBaseline(17, backbone="torchvision/resnet50")
    assert sum(each.numel() for each in model.parameters()) == 33_999_697


def test_hrnet_w32_has_the_fine_map() -> None:
    with torch.device("meta"):
        model = SimpleBaseline(
            17, backbone="timm/hrnet_w32", widths=[], feature_stride=4, backbone_args={"feature_location": ""}
        )
    assert model.head.in_channels == 32


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2, 4, 8, 16, 32"):
        SimpleBaseline(14, backbone="torchvision/mobilenet_v2", feature_stride=3)
    with pytest.raises(ValueError, match="no keypoints"):
        SimpleBaseline(0, backbone="torchvision/mobilenet_v2")
