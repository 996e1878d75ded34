"""Keypoint detection: perfect detections give perfect metrics, in pixels of the original image; files and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.sample_recipes import settings_kept
from torch import Tensor, nn

import paceline
from paceline.cli import main
from paceline.core.errors import DataError, RecipeError
from paceline.data.batch import Batch
from paceline.data.datasets.coco import Coco
from paceline.engine.predictions import PredictionTable
from paceline.metrics.metric import merge_states
from paceline.models.detector import KeypointDetections
from paceline.tasks.keypoint_detection import KeypointDetection


class Perfect(nn.Module):
    """Detects the people of a batch, whatever the images; each is labeled by how certain it is."""

    loss_names = ("loss",)
    predicts_keypoints = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.batch = Batch()

    def forward(self, images: Tensor, targets: Any = None) -> Any:
        if targets is not None:
            return {"loss": (self.weight * sum(each["keypoints"].sum() for each in targets), torch.ones(()))}
        fields = [self.batch[name] for name in ("boxes", "classes", "keypoints")]
        return [
            KeypointDetections(boxes, torch.linspace(0.9, 0.5, len(boxes)), labels, found[..., :2], found[..., 2] - 0.5)
            for boxes, labels, found in zip(*fields, strict=True)
        ]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Batch, Coco]]:
    """Resized images of people, where the data set's own keypoints are kept beside those of the batch."""
    folder = tmp_path_factory.mktemp("people")
    with settings_kept():
        assert main(["sample", "keypoints", str(folder / "keypoints_sample"), "--number", "12"]) == 0
        resize = {"name": "resize", "size": [64, 96]}
        changes = {"data.val.transforms": [resize], "data.num_workers": 0, "data.val.per_object": False}
        roots = {f"data.{split}.root": str(folder / "keypoints_sample") for split in ("train", "val")}
        run = paceline.build("keypoints_sample", changes | roots, folder / "run")
        loader = run.evaluations["val"].loader
        ids = np.arange(len(loader.dataset))
        assert isinstance(loader.dataset, Coco)
        yield loader.transform_batch(loader.fetch(0, ids), 0, torch.device("cpu")), loader.dataset


def task_of(dataset: Any, **changes: Any) -> KeypointDetection:
    parts = {"model": Perfect(), "classes": dataset.classes, "joints": dataset.joints}
    return KeypointDetection(**parts | changes)


def test_perfect_detections_give_perfect_metrics_and_files(batch: tuple[Batch, Coco], tmp_path: Path) -> None:
    """Boxes are measured as keypoints are: where the data set has them."""
    people, dataset = batch
    task, model = task_of(dataset), Perfect()
    model.batch = people
    found = task.predict(model, people)
    assert not np.allclose(found[0].keypoints, people["keypoints"][0][..., :2])
    for metric in task.metrics():
        values = metric.compute(merge_states([metric.update(found, people)]))
        means = {name: value for name, value in values.items() if "ap" in name}
        assert means
        assert all(value == pytest.approx(1) for value in means.values()), means
    table = PredictionTable(tmp_path / "val.json", dataset, task)
    table.finish([table.metrics[0].update(found, people)])
    first = json.loads((tmp_path / "val.json").read_text())[0]
    expected = people["truth_keypoints"][0][0]
    places = np.reshape(first["keypoints"], (-1, 3))[expected[:, 2] > 0, :2]
    assert np.allclose(places + 0.5, expected[expected[:, 2] > 0, :2], atol=0.01)  # COCO numbers pixels
    assert first["image_id"] == people["image_id"][0]


def test_crowds_are_not_learned_from(batch: tuple[Batch, Coco]) -> None:
    people, dataset = batch
    crowd = [torch.ones_like(each) if index == 0 else each for index, each in enumerate(people["crowd"])]
    targets = task_of(dataset)._targets(Batch({**people, "crowd": crowd}))
    counts = [len(each) for each in people["keypoints"]]
    assert [len(each["keypoints"]) for each in targets] == [len(each["boxes"]) for each in targets] == [0, *counts[1:]]


def test_people_are_drawn_with_their_keypoints(batch: tuple[Batch, Coco]) -> None:
    people, dataset = batch
    task, model = task_of(dataset), Perfect()
    model.batch = people
    truth, predicted = task.draw(people, task.predict(model, people), 0)
    blank = {"keypoints": [torch.zeros_like(each) for each in people["keypoints"]]}
    [without] = task.draw(Batch({**people, **blank}), None, 0)
    assert (truth.image != without.image).any()
    assert predicted.image.shape == truth.image.shape
    image = dataset.read(0)["image"]
    panel = task.draw_prediction(image, people, task.predict(model, people), 0)
    assert panel.image.shape == image.shape


def test_images_of_few_keypoints_are_left_out(batch: tuple[Batch, Coco]) -> None:
    root = Path(batch[1].annotations).parent
    counts = [int((each["keypoints"][..., 2] > 0).sum()) for each in map(batch[1].read, range(len(batch[1])))]
    least = sorted(counts)[1]
    chosen = Coco(root, "val.json", keypoints=True, min_keypoints=least)
    assert len(chosen) == sum(count >= least for count in counts) < len(counts)
    kept = [int((chosen.read(index)["keypoints"][..., 2] > 0).sum()) for index in range(len(chosen))]
    assert kept == [count for count in counts if count >= least]


def test_data_without_keypoints_and_models_without_are_refused(batch: tuple[Batch, Coco]) -> None:
    with pytest.raises(DataError, match="keypoints: true"):
        task_of(batch[1], joints=None)
    with pytest.raises(RecipeError, match="keypointrcnn"):
        task_of(batch[1], model=nn.Linear(2, 2))
