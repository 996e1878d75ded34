"""Keypoints from heatmaps: Gaussians whose places are known, mirror images, borders and flat maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.losses.heatmap import gaussian_heatmaps
from paceline.models.simple_baseline import Decode, decode_heatmaps, flip_heatmaps

SIZE, MAP = (96, 128), (24, 32)  # a quarter


def random_points(number: int, border: float) -> Tensor:
    """Places [number, 5, 2] that are so many pixels inside the image."""
    random = torch.rand(number, 5, 2, generator=torch.Generator().manual_seed(0))
    return border + random * (torch.tensor([SIZE[1], SIZE[0]]) - 2 * border)


@pytest.mark.parametrize(("method", "largest"), [("dark", 0.02), ("quarter", 1.01), ("argmax", 2.01)])
@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_the_place_of_a_gaussian_is_found(method: Decode, largest: float, sigma: float) -> None:
    """A pixel of the map is 4 pixels of the image: the highest is up to 2 away, and half of that with a quarter."""
    points = random_points(40, border=24)
    found, scores = decode_heatmaps(gaussian_heatmaps(points, SIZE, MAP, sigma), SIZE, method)
    assert (found - points).abs().max() <= largest * (2 if method == "dark" and sigma == 1 else 1)
    assert scores.min() > 0.7


@pytest.mark.parametrize("method", ["dark", "quarter", "argmax"])
def test_places_near_the_border_are_found_nearly(method: Decode) -> None:
    points = random_points(40, border=0)
    found, _ = decode_heatmaps(gaussian_heatmaps(points, SIZE, MAP, 2.0), SIZE, method)
    assert (found - points).abs().max() < 5


@pytest.mark.parametrize("method", ["dark", "quarter", "argmax"])
@pytest.mark.parametrize("value", [0.0, -1.0, 0.3])
def test_a_flat_map_has_a_finite_place(method: Decode, value: float) -> None:
    found, scores = decode_heatmaps(torch.full((1, 2, 8, 8), value), (32, 32), method)
    assert found.isfinite().all()
    assert scores.eq(value).all()


def test_heatmaps_of_a_flipped_image_are_those_of_the_image() -> None:
    points, pairs = random_points(8, border=8), [(0, 3), (1, 2)]
    flipped = points.clone()
    flipped[..., 0] = SIZE[1] - flipped[..., 0]
    maps = gaussian_heatmaps(points, SIZE, MAP, 2.0)
    of_flipped = gaussian_heatmaps(flipped[:, [3, 2, 1, 0, 4]], SIZE, MAP, 2.0)
    assert torch.allclose(flip_heatmaps(of_flipped, pairs), maps, atol=1e-5)
