"""What losses and metrics of a user's are given in tasks whose targets are no single field of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.errors import DataError, RecipeError, TrainingError
from paceline.data.batch import Batch
from paceline.losses.adapter import Criterion
from paceline.losses.heatmap import HeatmapMSE
from paceline.losses.reconstruction import MaskedMSE
from paceline.metrics.adapter import SummedMetric
from paceline.models.detector import Detections
from paceline.tasks.detection import Detection, rows_of_boxes
from paceline.tasks.keypoints import heatmaps_and_places
from paceline.tasks.masked_autoencoder import MaskedAutoencoder, hidden_patches


def test_keypoints_are_in_pixels_of_the_heatmap() -> None:
    """A loss that draws Gaussians there is the one that ships, where all keypoints are labeled."""
    generator = torch.Generator().manual_seed(0)
    heatmaps = torch.randn(3, 2, 8, 16, generator=generator)
    people = [
        torch.cat([torch.rand(1, 2, 2, generator=generator) * 32, torch.full((1, 2, 1), 2.0)], 2) for _ in range(3)
    ]
    batch = Batch(id=torch.arange(3), image=torch.zeros(3, 3, 32, 64), keypoints=people)

    def mine(output: Tensor, target: Tensor) -> Tensor:
        down, across = torch.meshgrid(torch.arange(8) + 0.5, torch.arange(16) + 0.5, indexing="ij")
        x, y = target[..., 0, None, None], target[..., 1, None, None]
        return F.mse_loss(output, torch.exp(-((across - x) ** 2 + (down - y) ** 2) / 2))

    criterion = Criterion("mine", mine)
    criterion.pair = heatmaps_and_places
    own, shipped = criterion(heatmaps, batch), HeatmapMSE(sigma=1.0)(heatmaps, batch)
    torch.testing.assert_close(own.numerator / own.denominator, shipped.numerator / shipped.denominator)


def test_masked_patches_alone_are_compared() -> None:
    generator = torch.Generator().manual_seed(0)
    visible = torch.stack([torch.randperm(16, generator=generator)[:4].sort().values for _ in range(3)])
    masks = torch.ones(3, 16, dtype=torch.bool).scatter(1, visible, False)
    image = torch.randn(3, 2, 16, 16, generator=generator)
    batch = Batch(id=torch.arange(3), image=image, patch_mask=masks, visible_patches=visible)
    patches = torch.randn(3, 16, 32, generator=generator)
    output, target = hidden_patches(patches, batch)
    assert output.shape == target.shape == (3, 12, 32)
    shipped = MaskedMSE(normalize=False)(patches, batch)
    torch.testing.assert_close(F.mse_loss(output, target), shipped.numerator / shipped.denominator)


def test_detections_and_objects_are_rows() -> None:
    class Count:
        sums = ("scores", "objects")

        def __init__(self) -> None:
            self.scores, self.objects = 0.0, 0

        def update(self, preds: Tensor, target: Tensor) -> None:
            self.scores += float(preds[0, :, 4].sum())
            self.objects += target.shape[1]

        def compute(self) -> float:
            return self.scores / self.objects

    boxes = torch.tensor([[0.0, 0, 2, 2], [1, 1, 5, 4]])
    batch = Batch(
        id=torch.arange(2),
        boxes=[boxes, boxes[:0]],
        classes=[torch.tensor([1, 0]), torch.empty(0, dtype=torch.int64)],
        crowd=[torch.tensor([False, True]), torch.empty(0, dtype=torch.bool)],
    )
    found = [Detections(boxes, torch.tensor([0.5, 0.25]), torch.tensor([1, 2]))] * 2
    first, truth = (rows[0].tolist() for rows in rows_of_boxes(found, batch))
    assert first == [[0, 0, 2, 2, 0.5, 1], [1, 1, 5, 4, 0.25, 2]]
    assert truth == [[0, 0, 2, 2, 1]], "crowds are left out"
    metric = SummedMetric("mine", Count())
    metric.pair = rows_of_boxes
    assert metric.compute(metric.update(found, batch)) == {"mine": 1.5}


def test_what_a_detector_must_return_is_named() -> None:
    class Detector(nn.Module):
        loss_names = ("boxes",)
        wrong_losses: Any
        wrong_detections: Any

        def forward(self, images: Tensor, targets: Any = None) -> Any:
            return self.wrong_losses if targets is not None else self.wrong_detections

    model = Detector()
    task = Detection(model, ["disc"])
    fields = {"boxes": torch.zeros(1, 4), "classes": torch.zeros(1).long(), "crowd": torch.zeros(1).bool()}
    batch = Batch(id=torch.arange(1), image=torch.zeros(1, 3, 8, 8)) | {name: [each] for name, each in fields.items()}
    for losses, found in (({}, ""), ({"boxes": torch.ones(())}, '"boxes": Tensor'), (torch.ones(()), "Tensor")):
        model.wrong_losses = losses
        with pytest.raises(TrainingError, match=rf'"boxes": \(total, count\).*got {found}'):
            task.losses(model, Batch(batch))
    for detections, found in ((torch.ones(1), "Tensor"), ([{}], "a list of dict")):
        model.wrong_detections = detections
        with pytest.raises(TrainingError, match=f"list of Detections; got {found}"):
            task.predict(model, Batch(batch))
    with pytest.raises(DataError, match="no labels"):
        task.losses(model, Batch({name: each for name, each in batch.items() if name != "classes"}))


def test_shapes_that_do_not_fit_name_the_key() -> None:
    masks = torch.ones(1, 4, dtype=torch.bool)
    batch = Batch(image=torch.zeros(1, 3, 16, 16), patch_mask=masks, visible_patches=torch.zeros(1, 1).long())
    with pytest.raises(RecipeError, match=r"\[1, 16, 48\].*num_patches: 4 needs \[1, 4, 192\]"):
        hidden_patches(torch.zeros(1, 16, 48), batch)
    people = Batch(id=torch.arange(1), image=torch.zeros(1, 3, 16, 16), keypoints=[torch.ones(1, 5, 3)])
    with pytest.raises(RecipeError, match=r"\[1, 2, 4, 4\].*num_keypoints"):
        heatmaps_and_places(torch.zeros(1, 2, 4, 4), people)


def test_a_model_without_features_is_no_masked_autoencoder() -> None:
    class Sequential(nn.Module):
        features = nn.Sequential()

    for model in (nn.Linear(1, 1), Sequential()):
        with pytest.raises(RecipeError, match=r"features\(images\)"):
            MaskedAutoencoder({}, {}, model)
