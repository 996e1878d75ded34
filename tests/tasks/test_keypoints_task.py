"""Keypoints: perfect heatmaps give perfect metrics, in pixels of the original image; flips, bad input, strategies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spoiled import NORMALIZE, Spoiled, copy_of
from support.forkserver import script_ranks
from support.sample_recipes import SCRIPTS, records, settings_kept, small_recipe, write_sample
from torch import Tensor, nn

import paceline
from paceline.cli import main
from paceline.data.batch import Batch, KeypointNames
from paceline.data.datasets.coco import Coco
from paceline.losses.heatmap import gaussian_heatmaps, stack_keypoints
from paceline.metrics.metric import merge_states
from paceline.models.simple_baseline import flip_heatmaps
from paceline.tasks.keypoints import Keypoints

JOINTS = KeypointNames(["left_hand", "right_hand", "nose"], [(0, 1)], [(0, 2)])


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with settings_kept():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample("keypoints", tmp_path_factory.mktemp("keypoints"))


class Perfect(nn.Module):
    """Gives the heatmaps of a batch's keypoints, whatever the images."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        height, width = batch["image"].shape[-2:]
        self.maps = gaussian_heatmaps(stack_keypoints(batch)[..., :2], (height, width), (height // 4, width // 4), 2.0)

    def forward(self, images: Tensor) -> Tensor:
        return self.maps


@pytest.mark.parametrize("degrees", [0, 30])
def test_perfect_heatmaps_give_perfect_metrics(recipe: Path, tmp_path: Path, degrees: int) -> None:
    """Through crops that are scaled and rotated, measured where the data set has its keypoints."""
    crop = {"name": "pose_crop", "size": [128, 96], "margin": 2.0, "scale": [0.8, 1.2], "degrees": degrees}
    run = paceline.build(recipe, {"data.val.transforms": [crop], "task.flip": False}, tmp_path)
    loader = run.evaluations["val"].loader
    batches = [
        loader.transform_batch(loader.fetch(0, np.arange(i, i + 3)), 0, torch.device("cpu")) for i in range(0, 9, 3)
    ]
    poses = [run.task.predict(Perfect(batch), batch) for batch in batches]
    truths = [truth[0] for batch in batches for truth in batch["truth_keypoints"]]
    found = [each for pose in poses for each in pose.keypoints]
    errors = [(each - truth[:, :2])[truth[:, 2] > 0].abs().max() for each, truth in zip(found, truths, strict=True)]
    assert max(map(float, errors)) < 0.2
    for metric in run.task.metrics():
        values = metric.compute(merge_states(map(metric.update, poses, batches)))
        perfect = {name: value for name, value in values.items() if name.startswith(("pck", "ap", "ar"))}
        assert all(value == pytest.approx(1) for value in perfect.values()), perfect


def test_flip_averages_the_heatmaps_of_the_flipped_image() -> None:
    torch.manual_seed(0)
    model, images = nn.Conv2d(3, 3, 3, stride=4, padding=1), torch.randn(2, 3, 16, 24)
    batch = Batch({"id": torch.arange(2), "image": images})
    plain, flipped = (Keypoints({}, {}, JOINTS, flip=flip).predict(model, batch) for flip in (False, True))
    assert torch.equal(plain.heatmaps, model(images))
    expected = (model(images) + flip_heatmaps(model(images.flip(-1)), JOINTS.pairs)) / 2
    assert torch.equal(flipped.heatmaps, expected)
    assert expected[0, 0, 1, 2] == (model(images)[0, 0, 1, 2] + model(images.flip(-1))[0, 1, 1, 3]) / 2


def test_metrics_are_those_that_the_names_allow() -> None:
    assert Keypoints({}, {}, JOINTS).main_metric == "loss"
    face = KeypointNames(["nose", "left_eye", "right_eye"], [(1, 2)], [])
    assert Keypoints({}, {}, face).main_metric == "ap"
    assert Keypoints({}, {}, JOINTS).draw(_sample_batch(), None, 0)[0].image.any()


def _sample_batch() -> Batch:
    keypoints = [torch.tensor([[[3.0, 4, 2], [0, 0, 0], [9, 9, 1]]])]
    return Batch({"id": torch.arange(1), "image": torch.zeros(1, 3, 16, 16), "keypoints": keypoints})


def test_each_person_is_a_sample(recipe: Path) -> None:
    root = recipe.parent / "keypoints"
    people = json.loads((root / "val.json").read_text())["annotations"]
    images, persons = (Coco(root, "val.json", keypoints=True, per_object=each) for each in (False, True))
    assert len(persons) == len(people) > len(images)
    for index, person in enumerate(people):
        sample = persons.read(index)
        assert (sample["image_id"], len(sample["boxes"])) == (person["image_id"], 1)
        expected = np.array(person["keypoints"]).reshape(1, 14, 3)
        assert sample["keypoints"] == pytest.approx(expected + (expected[..., 2:] > 0) * [0.5, 0.5, 0], abs=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_do_a_step(strategy: str, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", str(recipe), f"train.strategy={strategy}", "train.steps=1", "--out", str(out)]
    commands = tmp_path / "commands.json"
    commands.write_text(json.dumps([(words, str(tmp_path))]), encoding="utf-8")
    done = script_ranks(2, SCRIPTS / "commands_in_turn.py", commands)
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    (step,) = (each for each in records(out) if each["split"] == "train")
    (alone,) = _one_step(recipe, tmp_path / "alone")
    assert step["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def _one_step(recipe: Path, out: Path) -> list[dict[str, Any]]:
    assert main(["train", str(recipe), "train.steps=1", "--out", str(out)]) == 0
    return [each for each in records(out) if each["split"] == "train"]


@pytest.fixture
def spoiled(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Spoiled:
    made = small_recipe("keypoints", Path("DATA"))
    for split in ("train", "val"):
        made["data"][split]["transforms"] = [{"name": "pose_crop", "size": [64, 64]}, NORMALIZE]
    kept = {name: made[name] for name in ("task", "model", "losses", "data", "evaluate")}
    return copy_of(recipe.parent / "keypoints", tmp_path / "spoiled", kept, capsys)


def change(spoiled: Spoiled, split: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = spoiled.data / f"{split}.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_people_without_labels_images_without_people_and_places_outside(spoiled: Spoiled) -> None:
    """None of them ends a run: who has no label is no sample, and a place outside is not learned."""

    def edit(content: dict[str, Any]) -> None:
        first, second, third = content["annotations"][:3]
        first["keypoints"] = [0] * 42
        second["keypoints"][:3] = [-500, 9000, 2]
        third["image_id"] = content["images"][-1]["id"]  # its own image may be empty now

    for split in ("train", "val"):
        change(spoiled, split, edit)
    answer = spoiled.tell("train")
    assert answer.code == 0, answer.err
    found = [each for each in records(spoiled.out) if each["split"] == "val"][-1]
    people = json.loads((spoiled.data / "val.json").read_text())["annotations"]
    assert found["num_samples"] == len(people) - 1
    assert all(np.isfinite(value) for value in found.values() if isinstance(value, float))


def test_nobody_is_refused(spoiled: Spoiled) -> None:
    change(spoiled, "train", lambda content: content.update(annotations=[]))
    answer = spoiled.tell("train")
    assert answer.code == 3
    assert "data.train" in answer.last
    assert "empty" in answer.last


def test_keypoints_of_another_number_are_named(spoiled: Spoiled) -> None:
    change(spoiled, "val", lambda content: content["annotations"][4].update(keypoints=[1, 2, 2]))
    answer = spoiled.tell("train")
    assert answer.code == 3
    assert "14 times x, y and a visibility" in answer.err
    assert "5 (" in answer.err


def test_data_without_keypoints_is_refused(spoiled: Spoiled) -> None:
    for split in ("train", "val"):
        spoiled.recipe["data"][split] |= {"keypoints": False, "per_object": False}
    answer = spoiled.tell("train")
    assert answer.code in (2, 3)
    assert "no keypoints" in answer.last
    spoiled.recipe["data"]["train"]["per_object"] = True
    assert spoiled.tell("train").code == 2


def test_several_people_in_a_sample_are_named(spoiled: Spoiled) -> None:
    spoiled.recipe["data"]["val"]["per_object"] = False
    answer = spoiled.tell("train")
    assert answer.code == 3
    assert "per_object" in answer.last
