"""The heatmap loss against its formula, in parts, and with keypoints that are missing."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.core.errors import DataError, RecipeError
from paceline.data.batch import Batch
from paceline.losses.heatmap import HeatmapMSE

SIGMA = 1.5


def random_batch(count: int = 4, joints: int = 3) -> tuple[torch.Tensor, Batch]:
    """The last sample has no person; a third of the keypoints is not labeled."""
    generator = torch.Generator().manual_seed(2)
    people = torch.rand(count, 1, joints, 3, generator=generator) * torch.tensor([32.0, 24, 3])
    people[..., 2] = people[..., 2].floor()
    keypoints = [*people[:-1], people[-1][:0]]
    outputs = torch.randn(count, joints, 6, 8, generator=generator)
    return outputs, Batch({"id": torch.arange(count), "image": torch.zeros(count, 3, 24, 32), "keypoints": keypoints})


def test_it_is_the_mean_over_labeled_keypoints_and_pixels() -> None:
    outputs, batch = random_batch()
    total, number = 0.0, 0
    for maps, people in zip(outputs.double().tolist(), batch["keypoints"], strict=True):
        for person in people.tolist():
            for plane, (x, y, seen) in zip(maps, person, strict=True):
                if seen:
                    number += 1
                    for row in range(6):
                        for column in range(8):
                            squared = (column + 0.5 - x / 4) ** 2 + (row + 0.5 - y / 4) ** 2
                            target = math.exp(-squared / (2 * SIGMA**2))
                            total += (plane[row][column] - target) ** 2 / 48
    term = HeatmapMSE(SIGMA)(outputs, batch)
    assert number > 3
    assert float(term.numerator) == pytest.approx(total, rel=1e-5)
    assert float(term.denominator) == HeatmapMSE(SIGMA).count(batch) == number


def test_what_is_not_labeled_is_not_learned() -> None:
    outputs, batch = random_batch()
    outputs.requires_grad_()
    (gradient,) = torch.autograd.grad(HeatmapMSE(SIGMA)(outputs, batch).numerator, outputs)
    seen = torch.stack([people[0, :, 2] > 0 if len(people) else torch.zeros(3) > 0 for people in batch["keypoints"]])
    assert gradient.abs().amax((2, 3)).gt(0).equal(seen)


def test_a_batch_without_people_has_no_loss() -> None:
    outputs, batch = random_batch()
    batch["keypoints"] = [people[:0] for people in batch["keypoints"]]
    term = HeatmapMSE()(outputs, batch)
    assert (float(term.numerator), float(term.denominator), float(HeatmapMSE().count(batch))) == (0, 0, 0)


def test_what_does_not_fit_is_refused() -> None:
    outputs, batch = random_batch()
    with pytest.raises(RecipeError, match=r"\[4, 2, 6, 8\].*\[N, 3, h, w\]"):
        HeatmapMSE()(outputs[:, :2], batch)
    with pytest.raises(DataError, match="no keypoints"):
        HeatmapMSE().count(Batch({"id": torch.arange(1)}))
    batch["keypoints"][1] = torch.zeros(2, 3, 3)
    with pytest.raises(DataError, match="sample 1 has 2 people"):
        HeatmapMSE().count(batch)
