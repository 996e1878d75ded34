"""The operators that stand in for torchvision's compiled ones, against plain loops."""

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.torchvision_ops import import_torchvision, nms


def boxes_and_scores(seed: int, number: int) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(seed)
    corners, spans = random.uniform(0, 200, (number, 2)), random.uniform(5, 80, (number, 2))
    boxes = np.concatenate([corners, corners + spans], 1).astype(np.float32)
    scores = random.integers(0, 50, number).astype(np.float32) / 50  # many are equal
    return torch.from_numpy(boxes), torch.from_numpy(scores)


def brute_force_nms(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    rows = boxes.double().tolist()
    kept: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: -float(scores[index])):
        left, top, right, bottom = rows[index]
        for other in kept:
            x1, y1, x2, y2 = rows[other]
            inner = max(0.0, min(right, x2) - max(left, x1)) * max(0.0, min(bottom, y2) - max(top, y1))
            union = (right - left) * (bottom - top) + (x2 - x1) * (y2 - y1) - inner
            if inner / union > threshold:
                break
        else:
            kept.append(index)
    return kept


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.9])
def test_nms_keeps_what_brute_force_keeps(seed: int, threshold: float) -> None:
    boxes, scores = boxes_and_scores(seed, 150)
    assert nms(boxes, scores, threshold).tolist() == brute_force_nms(boxes, scores, threshold)


def test_nms_of_nothing_and_of_negative_scores() -> None:
    assert nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 10], [20, 20, 30, 30]])
    assert nms(boxes, torch.tensor([-3.0, -1.0, -2.0]), 0.5).tolist() == [1, 2]


def test_torchvision_nms_works_with_or_without_its_compiled_operators() -> None:
    torchvision = import_torchvision()
    boxes, scores = boxes_and_scores(1, 100)
    assert torchvision.ops.nms(boxes, scores, 0.5).tolist() == brute_force_nms(boxes, scores, 0.5)
    labels = torch.arange(100) % 3
    kept = torchvision.ops.batched_nms(boxes, scores, labels, 0.5).tolist()
    expected = [
        int((labels == label).nonzero()[index])
        for label in range(3)
        for index in brute_force_nms(boxes[labels == label], scores[labels == label], 0.5)
    ]
    assert sorted(kept) == sorted(expected)


def brute_force_roi_align(features: Tensor, rois: Tensor, size: int, scale: float, ratio: int) -> Tensor:
    channels, height, width = features.shape[1:]
    pooled = torch.zeros(len(rois), channels, size, size, dtype=torch.float64)

    def value(image: Tensor, y: float, x: float) -> Tensor:
        if not (-1 <= y <= height and -1 <= x <= width):
            return torch.zeros(channels, dtype=torch.float64)
        y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
        top, left = int(y), int(x)
        bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
        down, across = y - top, x - left
        above = image[:, top, left] * (1 - across) + image[:, top, right] * across
        below = image[:, bottom, left] * (1 - across) + image[:, bottom, right] * across
        return above * (1 - down) + below * down

    for number, (image, *edges) in enumerate(rois.double().tolist()):
        left, top, right, bottom = (edge * scale for edge in edges)
        high, wide = max(bottom - top, 1.0) / size, max(right - left, 1.0) / size
        for row in range(size):
            for column in range(size):
                steps = [(step + 0.5) / ratio for step in range(ratio)]
                places = [(top + (row + y) * high, left + (column + x) * wide) for y in steps for x in steps]
                values = [value(features[int(image)].double(), *place) for place in places]
                pooled[number, :, row, column] = torch.stack(values).mean(0)
    return pooled


def test_roi_align_is_the_mean_of_interpolated_values() -> None:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, 9, 13, generator=random, dtype=torch.float64)
    corners, spans = torch.rand(12, 2, generator=random) * 80, torch.rand(12, 2, generator=random) * 60
    rois = torch.cat([torch.arange(12)[:, None] % 2, corners, corners + spans], 1).double()
    expected = brute_force_roi_align(features, rois, 3, 1 / 16, 2)
    found = import_torchvision().ops.roi_align(features, rois, (3, 3), 1 / 16, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
