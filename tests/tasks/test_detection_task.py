"""Which detections are drawn and written, and in what colors."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.models.detector import Detections, LossParts, Target
from paceline.tasks.detection import Detection, precision_recall_curves
from paceline.visualize.colors import class_color
from paceline.visualize.image import Image

CLASSES = [f"kind {number}" for number in range(16)]
SIDE = 320  # as large as panels are, so that boxes keep their places


class Known(nn.Module):
    """Detects an object of each class in a row, less and less certain: 0.92, 0.87, ... 0.17."""

    loss_names: Sequence[str] = ()

    def forward(self, images: Tensor, targets: Sequence[Target] | None = None) -> LossParts | list[Detections]:
        places = 20.0 * torch.arange(16)
        boxes = torch.stack([places, places + 1, places + 12, places + 13], 1)
        return [Detections(boxes, 0.92 - 0.05 * torch.arange(16), torch.arange(16)) for _ in images]


def batch(num_objects: int) -> Batch:
    places = 20.0 * torch.arange(num_objects)
    fields = {
        "boxes": [torch.stack([places, places + 1, places + 12, places + 13], 1)],
        "classes": [torch.arange(num_objects)],
    }
    return Batch(id=torch.arange(1), image=torch.zeros(1, 3, SIDE, SIDE), **fields)


def drawn_classes(image: Image) -> list[int]:
    return [number for number in range(16) if (image == class_color(number)).all(2).sum() > 20]


def drawn(num_objects: int, min_score: float | None = None) -> tuple[list[int], list[int], list[int]]:
    """The classes that are drawn as truth and as predictions, and the numbers in the caption."""
    task, model = Detection(Known(), CLASSES, min_score=min_score), Known()
    samples = batch(num_objects)
    truth, found = task.draw(samples, task.predict(model, samples), 0)
    assert {entry.order for entry in found.legend} == set(drawn_classes(found.image))
    numbers = [int(number) for number in re.findall(r"\d+(?= best| with)", found.caption)]
    return drawn_classes(truth.image), drawn_classes(found.image), numbers


def test_the_ten_best_are_drawn_or_as_many_as_there_are_objects() -> None:
    assert drawn(3) == ([0, 1, 2], list(range(10)), [10, 13])
    assert drawn(12) == (list(range(12)), list(range(12)), [12, 13])
    assert drawn(14)[1:] == (list(range(13)), [13]), "none below 0.3"


def test_the_least_score_that_is_asked_for_is_what_counts_and_is_drawn() -> None:
    assert drawn(3, 0.7)[1:] == (list(range(5)), [5])
    assert drawn(3, 0.2)[1:] == (list(range(15)), [15]), "also below 0.3, and more than ten"
    samples = batch(1)
    (found,) = Detection(Known(), CLASSES, min_score=0.7).predict(Known(), samples)
    assert found.scores.tolist() == found.scores[found.scores >= 0.7].tolist()
    assert found.labels.tolist() == [0, 1, 2, 3, 4]


def test_predictions_are_drawn_on_the_image_as_it_was_read() -> None:
    image, samples = np.zeros((SIDE, SIDE, 3), np.uint8), batch(0)
    task = Detection(Known(), CLASSES)
    panel = task.draw_prediction(image, samples, task.predict(Known(), samples), 0)
    assert (panel.image.shape, drawn_classes(panel.image)) == (image.shape, list(range(13)))
    assert panel.caption.startswith("13 ")


def test_names_are_written_on_20_boxes_at_most() -> None:
    image, places = np.zeros((200, 200, 3), np.uint8), torch.arange(21.0) * 6 + 20
    boxes = torch.stack([places, places, places + 40, places + 40], 1)
    task, areas = Detection(Known(), ["cat"], min_score=0.5), []
    for number in (20, 21):
        found = [Detections(boxes[:number], torch.ones(number), torch.zeros(number, dtype=torch.int64))]
        panel = task.draw_prediction(image, batch(0), found, 0)
        areas.append(int((panel.image == class_color(0)).all(2).sum()))
        assert panel.legend
    assert areas[1] < areas[0], "one box more, and no tags"


def test_the_curves_of_classes_have_the_colors_of_their_boxes() -> None:
    metrics = {"num_objects": torch.tensor([1, 2]), "precision": torch.linspace(0.2, 0.9, 2)[:, None].expand(2, 101)}
    plot = Detection(Known(), ["cat", "dog"]).draw_metrics(metrics)["precision_recall"]
    assert set(drawn_classes(plot)) >= {0, 1}


def test_of_many_classes_the_mean_and_the_most_frequent_are_drawn() -> None:
    classes = [f"class {number}" for number in range(80)]
    precision = torch.linspace(0, 1, 80, dtype=torch.float64)[:, None].expand(80, 101).clone()
    precision[79] = float("nan")  # a class that the split does not have
    title, curves = precision_recall_curves(classes, precision, torch.arange(80))
    assert list(curves) == ["mean of 79 classes", *(f"class {number}" for number in range(78, 69, -1))]
    assert "9 most frequent" in title
    recall, mean = curves["mean of 79 classes"]
    assert (len(mean), recall[-1]) == (101, 1)
    assert mean[0] == pytest.approx(39 / 79)


def test_few_classes_are_all_drawn_and_a_single_one_without_a_mean() -> None:
    title, curves = precision_recall_curves(["a", "b"], torch.ones(2, 101), torch.tensor([1, 2]))
    assert list(curves) == ["mean of 2 classes", "b", "a"]
    assert "frequent" not in title
    _, curves = precision_recall_curves(["a"], torch.ones(1, 101), torch.tensor([1]))
    assert list(curves) == ["a"]
    assert precision_recall_curves(["a"], torch.full((1, 101), float("nan")), torch.tensor([0]))[1] == {}
