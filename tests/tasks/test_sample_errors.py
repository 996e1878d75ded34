"""How wrong each sample is, task by task, by hand and against the task's own loss of one sample at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from paceline.data.batch import Batch, KeypointNames
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy
from paceline.losses.loss_term import Loss
from paceline.losses.pixel import PixelCrossEntropy
from paceline.losses.reconstruction import MaskedMSE
from paceline.metrics.detection import count_mistakes
from paceline.models.detector import Detections
from paceline.models.simple_baseline import Poses
from paceline.tasks.classification import Classification
from paceline.tasks.keypoints import Keypoints
from paceline.tasks.masked_autoencoder import MaskedAutoencoder, Reconstruction
from paceline.tasks.pixel_prediction import PixelPrediction
from paceline.tasks.saliency import Saliency
from paceline.tasks.segmentation import Segmentation
from paceline.tasks.video import VideoClassification

CLASSES = ["a", "b", "c"]
LOGITS = torch.tensor([[2.0, 0, 1], [0.0, 5, -1], [1.0, 1, 1], [9.0, -9, 0]])


def of_loss(loss: Loss, outputs: Tensor, batch: Batch) -> list[float]:
    """The loss of each sample on its own."""
    terms = [
        loss(outputs[index : index + 1], Batch({name: value[index : index + 1] for name, value in batch.items()}))
        for index in range(batch.size)
    ]
    return [float(term.numerator) / float(term.denominator) for term in terms]


@pytest.mark.parametrize("kind", [Classification, VideoClassification])
@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (CrossEntropy(), torch.tensor([0, 2, 1, 1])),
        (CrossEntropy(), torch.eye(3)[[0, 2, 1, 1]] * 0.5 + 1 / 6),
        (BinaryCrossEntropy(), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])),
    ],
)
def test_classes_by_their_cross_entropy(kind: type[Classification], loss: Loss, labels: Tensor) -> None:
    several = isinstance(loss, BinaryCrossEntropy)
    task = kind({"loss": loss}, {"loss": 1.0}, CLASSES, top_k=(1,), multi_label=several)
    batch = Batch(id=torch.arange(4), label=labels)
    assert task.sample_errors(LOGITS, batch).tolist() == pytest.approx(of_loss(loss, LOGITS, batch), rel=1e-5)
    if kind is VideoClassification:
        views = torch.stack([LOGITS, LOGITS], 1)
        assert task.sample_errors(views, batch).tolist() == pytest.approx(of_loss(loss, LOGITS, batch), rel=1e-4)


def test_several_labels_are_drawn_by_name() -> None:
    task = Classification({"bce": BinaryCrossEntropy()}, {"bce": 1.0}, CLASSES, multi_label=True)
    batch = Batch(
        id=torch.arange(3), image=torch.zeros(3, 3, 8, 8), label=torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    )
    logits = torch.tensor([[1.0, -1, 1], [-1.0, 2, -1], [-1.0, -1, -1]])
    panels = [task.draw(batch, logits, index)[0] for index in range(3)]
    assert [(panel.caption, panel.is_correct) for panel in panels] == [
        ("a, c", True), ("b, not none", False), ("none, not b", False),
    ]  # fmt: skip


def test_pixels_by_the_share_of_labeled_ones_that_are_wrong() -> None:
    task = Segmentation({"loss": PixelCrossEntropy(3)}, {"loss": 1.0}, CLASSES)
    truths = [torch.tensor([[0, 1], [2, 255]]), torch.tensor([[255, 255, 255]]), torch.tensor([[1, 1, 1, 0]])]
    maps = [torch.tensor([[0, 2], [1, 1]]), torch.tensor([[0, 1, 2]]), torch.tensor([[1, 1, 1, 0]])]
    found = task.sample_errors(PixelPrediction(LOGITS, maps), Batch(id=torch.arange(3), mask=truths))
    assert found.tolist() == pytest.approx([2 / 3, 0, 0])


def test_maps_by_their_mean_absolute_error() -> None:
    task = Saliency({}, {}, ["salient"])
    truths = [torch.tensor([[0, 255], [255, 0]]), torch.tensor([[0, 255]])]
    maps = [torch.tensor([[0.0, 1], [0, 1]], dtype=torch.float64), torch.tensor([[0.0, 1]], dtype=torch.float64)]
    found = task.sample_errors(PixelPrediction(LOGITS, maps), Batch(id=torch.arange(2), mask=truths))
    assert found.tolist() == [0.5, 0]


def test_keypoints_by_their_distance_in_diagonals() -> None:
    task = Keypoints({}, {}, KeypointNames(CLASSES, [], []))
    truth = torch.tensor([[[[0.0, 0, 2], [10, 10, 1], [5, 5, 0]]], [[[1.0, 1, 0], [2, 2, 0], [3, 3, 0]]]])
    points = torch.tensor([[[3.0, 4], [10, 10], [30, 30]], [[0.0, 0], [0, 0], [0, 0]]])
    batch = Batch(id=torch.arange(2), image=torch.zeros(2, 3, 30, 40), keypoints=list(truth))
    found = task.sample_errors(Poses(points, points, points, torch.ones(2, 3)), batch)
    assert found.tolist() == pytest.approx([2.5 / 50, 0])


class Nothing(nn.Module):
    def features(self, images: Tensor) -> Tensor:
        return images


@pytest.mark.parametrize("normalize", [True, False])
def test_hidden_patches_by_their_loss(normalize: bool) -> None:
    loss = MaskedMSE(normalize)
    task = MaskedAutoencoder({"masked_mse": loss}, {"masked_mse": 1.0}, Nothing())
    torch.manual_seed(0)
    masks = torch.tensor([[True, True, False, False], [True, False, True, False]])
    batch = Batch(id=torch.arange(2), image=torch.rand(2, 3, 8, 8), patch_mask=masks, visible_patches=torch.zeros(2, 2))
    patches = torch.rand(2, 4, 48)
    found = task.sample_errors(Reconstruction(patches, torch.zeros(2, 1)), batch)
    assert found.tolist() == pytest.approx(of_loss(loss, patches, batch), rel=1e-5)


BOX, OTHER, FAR = [0.0, 0, 10, 10], [0.0, 0, 10, 9], [50.0, 50, 60, 60]


def image_of(*objects: tuple[list[float], int, bool]) -> dict[str, Tensor]:
    boxes = torch.tensor([box for box, _, _ in objects]).reshape(-1, 4)
    labels, crowd = torch.tensor([each[1] for each in objects]), torch.tensor([each[2] for each in objects]).bool()
    return {"boxes": boxes, "classes": labels.long(), "crowd": crowd, "area": torch.zeros(len(objects))}


def found_in(*rows: tuple[list[float], int, float]) -> Detections:
    boxes = torch.tensor([box for box, _, _ in rows]).reshape(-1, 4)
    return Detections(boxes, torch.tensor([row[2] for row in rows]), torch.tensor([row[1] for row in rows]).long())


def test_boxes_by_how_many_are_false_and_missed() -> None:
    cases = [
        (image_of((BOX, 0, False)), found_in((OTHER, 0, 0.9)), 0),
        (image_of((BOX, 0, False)), found_in((OTHER, 1, 0.9)), 2),  # of another class: false, and the object is missed
        (image_of((BOX, 0, False), (FAR, 1, False)), found_in((BOX, 0, 0.9), (OTHER, 0, 0.8), (FAR, 1, 0.2)), 2),
        (image_of((BOX, 0, True)), found_in((BOX, 0, 0.9)), 0),  # a crowd is neither right nor wrong
        (image_of((BOX, 0, False)), found_in(), 1),
        (image_of(), found_in((BOX, 2, 0.31)), 1),
        (image_of(), found_in(), 0),
    ]
    fields = {name: [case[0][name] for case in cases] for name in cases[0][0]}
    batch = Batch({"id": torch.arange(len(cases)) + 5, **fields})
    assert count_mistakes([found for _, found, _ in cases], batch, 0.3).tolist() == [number for *_, number in cases]


def test_nan_is_kept_for_the_ranking() -> None:
    task = Classification({"loss": CrossEntropy()}, {"loss": 1.0}, CLASSES, top_k=(1,))
    (error,) = task.sample_errors(LOGITS[:1] * math.nan, Batch(id=torch.arange(1), label=torch.tensor([0]))).tolist()
    assert math.isnan(error)
