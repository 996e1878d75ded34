"""Tasks on images of different sizes: what is learned and measured does not depend on what shares a micro-batch.

In the nets here the first layer alone looks around, and sees zeros beside an image, padded or not. Deeper layers of
others see what the first one makes of the padding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.sample_recipes import settings_kept
from torch import Tensor, nn

from paceline import cli
from paceline.core.registry import register
from paceline.engine.evaluate import evaluate
from paceline.engine.run import Run
from paceline.engine.step import train_step
from paceline.models.detector import Detections
from paceline.plan.rehearse import _largest_batch
from paceline.recipe.build import Builder
from paceline.recipe.load import load
from paceline.recipe.validate import validate

SIZES = [(30, 50), (44, 28), (64, 64), (20, 56), (48, 40), (33, 37), (52, 24), (40, 40)]
NORMALIZE = {"name": "normalize", "mean": [0.5], "std": [0.25]}
SHORTEST = {"name": "resize", "size": 32, "max_size": 48}
PRECISIONS = ["fp32", "tf32", "bf16", "fp16", "O0", "O1", "O2", "O3"]


def shallow(num_classes: int) -> nn.Module:
    """A net whose first layer alone looks around."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, num_classes, 1))


def brightness(num_classes: int) -> nn.Module:
    """What is bright is salient."""
    made = nn.Conv2d(3, 1, 1)
    nn.init.constant_(made.weight, 5.0)
    nn.init.zeros_(made.bias)  # type: ignore[arg-type]
    return made


class Finder(nn.Module):
    """Finds the box around what is bright; it has nothing to learn."""

    loss_names = ("nothing",)
    selection: dict[str, Any] = {"score_thresh": 0.0, "nms_thresh": 0.5, "detections_per_img": 9}

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor, targets: Any = None, image_sizes: Any = None) -> Any:
        for image, (height, width) in zip(images, image_sizes or [images.shape[-2:]] * len(images), strict=True):
            assert not image[:, height:].any()
            assert not image[:, :, width:].any()
        if targets is not None:
            return {"nothing": ((self.weight * images.sum() * 0).sum(), float(len(images)))}
        return [self._find(image.mean(0) > 1) for image in images]

    def _find(self, bright: Tensor) -> Detections:
        rows, columns = (bright.any(axis).nonzero().flatten() for axis in (1, 0))
        box = torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()
        return Detections(box[None], torch.tensor([0.9]), torch.tensor([0]))


@pytest.fixture(autouse=True)
def _models(own_names: None) -> Iterator[None]:
    register.model("shallow")(shallow)
    register.model("brightness")(brightness)
    register.model("finder")(Finder)
    with settings_kept():
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dark images with a bright rectangle each, its masks, gray and of classes, and its box."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("images", "masks", "classes", "folder/train/a"):
        (folder / name).mkdir(parents=True)
    generator, boxes = np.random.default_rng(0), []
    for number, (height, width) in enumerate(SIZES):
        top, left = int(generator.integers(2, height // 3)), int(generator.integers(2, width // 3))
        bottom, right = height - int(generator.integers(2, height // 4)), width - int(generator.integers(2, width // 4))
        mask = np.zeros((height, width), np.uint8)
        mask[top:bottom, left:right] = 255
        image = np.repeat(mask[..., None], 3, 2)
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
        Image.fromarray(image).save(folder / "folder/train/a" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
        ids = (mask > 0).astype(np.uint8) * (1 + number % 2)
        ids[: number % 3] = 255
        Image.fromarray(ids).save(folder / "classes" / f"{number}.png")
        boxes.append([left, top, right - left, bottom - top])
    content = {
        "images": [{"id": k, "file_name": f"{k}.png", "height": h, "width": w} for k, (h, w) in enumerate(SIZES)],
        "categories": [{"id": 1, "name": "bright"}],
        "annotations": [{"id": k, "image_id": k, "category_id": 1, "bbox": box} for k, box in enumerate(boxes)],
    }
    (folder / "boxes.json").write_text(json.dumps(content))
    return folder


def write_recipe(folder: Path, data: Path, task: str, *changes: dict[str, Any]) -> Path:
    """A recipe of a task that trains and measures on all images."""
    parts: dict[str, tuple[dict[str, Any], str, list[str]]] = {
        "saliency": ({"dataset": "image_mask", "binary": True}, "shallow", ["pixel_bce", "cel", "iou_loss"]),
        "segmentation": (
            {"dataset": "image_mask", "masks": "classes", "classes": ["dark", "odd", "even"], "ignore_index": 255},
            "shallow",
            ["pixel_cross_entropy", "ohem_cross_entropy", "dice_loss"],
        ),
        "detection": ({"dataset": "coco", "annotations": "boxes.json"}, "finder", []),
    }
    dataset, model, losses = parts[task]
    split = {**dataset, "root": str(data), "transforms": [*(changes or [SHORTEST]), NORMALIZE]}
    recipe: dict[str, Any] = {
        "name": task, "task": task, "model": model, "losses": losses, "optimizer": {"name": "sgd", "lr": 0.1},
        "data": {"batch_size": 8, "train": split, "val": split, "num_workers": 0},
        "train": {"steps": 2, "device": "cpu", "threads": 1, "micro_batch_size": 8},
        "evaluate": {"batch_size": 8}, "logging": {"images": False, "tensorboard": False},
    }  # fmt: skip
    if not losses:
        del recipe["losses"]
    path = folder / f"{task}.json"
    path.write_text(json.dumps(recipe))
    return path


def build(path: Path, out: Path, *overrides: str) -> Run:
    return Builder(validate(load(str(path), list(overrides)))).run(out)


def first_step(run: Run) -> tuple[dict[str, float], Tensor]:
    """The losses of a step and the weights behind it."""
    run.freezing.train_mode(run.model)
    result = train_step(run, next(iter(run.batches)))
    losses = {name: float(value) for name, value in result.losses.items()}
    return losses, torch.cat([each.detach().float().flatten() for each in run.model.parameters()])


@pytest.mark.parametrize("task", ["saliency", "segmentation"])
def test_eight_images_learn_like_four_micro_batches_of_two(task: str, data: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data, task)
    losses, weights = first_step(build(recipe, tmp_path))
    for size in (2, 3):
        others, other_weights = first_step(build(recipe, tmp_path, f"train.micro_batch_size={size}"))
        assert others == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(other_weights, weights, rtol=1e-5, atol=1e-5)


def test_classes_without_an_id_that_is_ignored_are_padded_too(data: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data, "segmentation")
    content = json.loads(recipe.read_text())
    for split in ("train", "val"):
        given = content["data"][split]
        del given["ignore_index"], given["classes"]
        content["data"][split] = {**given, "masks": "masks", "label_map": {"dark": 0, "bright": 255}}
    recipe.write_text(json.dumps(content))
    losses, _ = first_step(build(recipe, tmp_path))
    others, _ = first_step(build(recipe, tmp_path, "train.micro_batch_size=2"))
    assert others == pytest.approx(losses, rel=1e-5)
    metrics = [evaluate(build(recipe, tmp_path, f"evaluate.batch_size={size}"), "val").metrics for size in (1, 8)]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_takes_padded_images(precision: str, data: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data, "segmentation")
    words = ["train.loss_scale=128"] if precision in ("fp16", "O1", "O2") else []
    expected, _ = first_step(build(recipe, tmp_path))
    losses, weights = first_step(build(recipe, tmp_path, f"train.precision={precision}", *words))
    assert losses == pytest.approx(expected, abs=0.05)
    assert weights.isfinite().all()


AUGMENTED = {
    "saliency": ["task={name: saliency, flip: true}"],
    "segmentation": ["task={name: segmentation, flip: true, scales: [0.75, 1.0], window: 24, stride: 16}"],
    "detection": ["task={name: detection, flip: true}"],
}


@pytest.mark.parametrize("original", ["true", "false"])
@pytest.mark.parametrize("task", AUGMENTED)
def test_metrics_do_not_depend_on_what_is_predicted_together(
    task: str, original: str, data: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, data, task)
    for augmented in ([], AUGMENTED[task]):
        words = [*augmented, f"evaluate.original_size={original}"]
        alone = evaluate(build(recipe, tmp_path, *words, "evaluate.batch_size=1"), "val").metrics
        for size in (3, 8):
            together = evaluate(build(recipe, tmp_path, *words, f"evaluate.batch_size={size}"), "val").metrics
            # Of ratio losses, the denominators of all images are added.
            assert together == pytest.approx(alone, rel=1e-4, abs=1e-4, nan_ok=True)


CHANGES = [
    SHORTEST,
    {"name": "random_shortest_size", "min_size": [24, 40], "max_size": 60},
    {"name": "random_resize", "min_size": 20, "max_size": 60},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each["name"])
def test_boxes_are_found_where_they_are_in_the_images_as_they_were_read(
    change: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    found = evaluate(build(write_recipe(tmp_path, data, "detection", change), tmp_path, "evaluate.batch_size=5"), "val")
    assert found.metrics["ap50"] == 1
    assert found.metrics["ap"] > 0.8
    flipped = [*AUGMENTED["detection"], "evaluate.batch_size=5"]
    assert evaluate(build(tmp_path / "detection.json", tmp_path, *flipped), "val").metrics["ap50"] == 1


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each["name"])
def test_maps_are_measured_at_the_size_in_which_they_were_read(
    change: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, data, "saliency", change)
    metrics = evaluate(build(recipe, tmp_path, "model=brightness"), "val").metrics
    assert metrics["max_f"] > 0.97
    assert metrics["mae"] < 0.04  # of edges that are interpolated


def run_command(*words: object) -> int:
    return cli.main([str(word) for word in words])


def test_a_model_is_padded_to_multiples_that_it_asks_for(data: Path, tmp_path: Path) -> None:
    class Divided(Finder):
        size_divisible = 32

        def forward(self, images: Tensor, targets: Any = None, image_sizes: Any = None) -> Any:
            assert all(side % 32 == 0 for side in images.shape[-2:])
            return super().forward(images, targets, image_sizes)

    register.model("divided")(Divided)
    recipe = write_recipe(tmp_path, data, "detection")
    for size in (1, 8):
        run = build(recipe, tmp_path, "model=divided", f"evaluate.batch_size={size}")
        assert evaluate(run, "val").metrics["ap50"] == 1
    first_step(run)


def test_where_one_size_is_needed_the_error_names_a_file_both_sizes_and_what_to_do(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, data, "detection")
    split = {"dataset": "image_folder", "root": str(data / "folder"), "split": "train", "transforms": [NORMALIZE]}
    content = {
        "name": "one_size", "task": "classification", "model": {"name": "convnet", "widths": [8]},
        "losses": ["cross_entropy"], "optimizer": {"name": "sgd", "lr": 0.1},
        "data": {"batch_size": 8, "train": split}, "train": {"steps": 1},
    }  # fmt: skip
    (tmp_path / "classification.json").write_text(json.dumps(content))
    register.model("of_one_size")(type("OfOneSize", (Finder,), {"pads_images": False}))
    for words in ([tmp_path / "classification.json"], [recipe, "model=of_one_size"]):
        assert run_command("train", *words, "train.device=cpu", "--out", tmp_path / "out", "--fresh") == 3
        message = capsys.readouterr().err
        assert f"{data}/" in message
        assert ".png: samples" in message
        assert "differ in size (" in message
        assert "{name: resize, size: [224, 224]}" in message
        assert ("this model needs one size: add a transform" in message) == ("model=of_one_size" in words)
        assert ("or use a task that pads images: detection, instance_segm" in message) == (len(words) == 1)
    grouped = [tmp_path / "classification.json", "data.aspect_ratio_group_factor=1"]
    assert run_command("train", *grouped, "--out", tmp_path / "out", "--fresh") == 2
    assert "data.aspect_ratio_group_factor: task classification takes images of one size" in capsys.readouterr().err


def test_a_step_of_groups_holds_upright_or_wide_images(data: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data, "segmentation")
    words = ["data.aspect_ratio_group_factor=0", "data.batch_size=2", "train.micro_batch_size=2", "train.steps=12"]
    run = build(recipe, tmp_path, *words)
    shapes = [[SIZES[number] for number in step.micro_batches[0].batch.ids.tolist()] for step in run.batches]
    mixed = [len({height > width for height, width in step}) > 1 for step in shapes]  # 3 upright images, 5 others
    assert [sum(mixed[start : start + 4]) for start in (0, 4, 8)] == [1] * 3
    assert sorted(size for step in shapes[4:8] for size in step) == sorted(SIZES)


def test_a_plan_rehearses_the_tallest_and_the_widest_images_together(data: Path, tmp_path: Path) -> None:
    run = build(write_recipe(tmp_path, data, "saliency", {"name": "resize", "size": 32}), tmp_path)
    resized = [32 * max(size) // min(size) for size in SIZES]
    tall = max(each for each, (height, width) in zip(resized, SIZES, strict=True) if height >= width)
    wide = max(each for each, (height, width) in zip(resized, SIZES, strict=True) if width >= height)
    assert _largest_batch(run.train_loader)["image"].shape[-2:] == (tall, wide)
    largest = math.prod(_largest_batch(run.train_loader)["image"].shape[-2:])
    assert all(largest >= run.train_loader.fetch(0, np.arange(8))["image"][0, 0].numel() for _ in range(2))
