"""`evaluate.original_size`: masks of an evaluation keep the size that they have in their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.errors import DataError
from paceline.core.world import World
from paceline.data.split_loader import SplitLoader
from paceline.recipe.build_context import BuildContext
from paceline.recipe.build_data import make_split_loaders
from paceline.recipe.load import load
from paceline.recipe.validate import validate

RECIPE = """
name: sizes
task: {task}
model: {{name: unet, backbone: timm/lcnet_035}}
data:
  batch_size: 2
  train: &split {{dataset: {dataset}, root: {root}, {more}transforms: [{{name: resize, size: [16, 16]}}]}}
  val: *split
losses: [{loss}]
optimizer: {{name: sgd, lr: 0.1}}
train: {{epochs: 1}}
evaluate: {{{evaluate}}}
"""
MASKS = {"saliency": "binary: true, ", "segmentation": "classes: [a, b], "}


def make_loaders(folder: Path, task: str, dataset: str, more: str, asked: str) -> dict[str, SplitLoader]:
    recipe = folder / "recipe.yaml"
    loss = {"saliency": "pixel_bce", "segmentation": "pixel_cross_entropy"}.get(task, "cross_entropy")
    recipe.write_text(
        RECIPE.format(task=task, dataset=dataset, root=folder, more=more, loss=loss, evaluate=asked), encoding="utf-8"
    )
    return make_split_loaders(BuildContext(validate(load(str(recipe), [])), World(0, 1, 0, torch.device("cpu"))))


@pytest.mark.parametrize(
    ("task", "asked", "is_kept"),
    [
        ("saliency", "", True),
        ("saliency", "original_size: auto", True),
        ("saliency", "original_size: false", False),
        ("segmentation", "", False),
        ("segmentation", "original_size: true", True),
    ],
)
def test_it_is_on_where_the_field_measures_so(task: str, asked: str, is_kept: bool, tmp_path: Path) -> None:
    masks = [np.eye(20, width, dtype=np.uint8) * (255 if task == "saliency" else 1) for width in (24, 30)]
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number, mask in enumerate(masks):
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
        Image.fromarray(np.stack([mask] * 3, -1)).save(tmp_path / "images" / f"{number}.png")
    loaders = make_loaders(tmp_path, task, "image_mask", MASKS[task], asked)
    train, val = (loaders[split].fetch(0, np.arange(2)) for split in ("train", "val"))
    assert "truth" not in train
    assert val["mask"].shape == train["mask"].shape == (2, 16, 16)
    assert ("truth" in val) == is_kept
    for number, mask in enumerate(masks if is_kept else []):
        assert np.array_equal(val["truth"][number], mask)
        corner = val["matrix"][number] @ torch.tensor([16.0, 16.0, 1.0])
        assert corner.tolist() == [mask.shape[1], mask.shape[0]]


def test_samples_without_masks_are_named_with_the_key(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / name / "0.png")
    val = make_loaders(tmp_path, "classification", "image_folder", "", "original_size: true")["val"]
    with pytest.raises(DataError, match=r"0\.png: .*evaluate\.original_size"):
        val.fetch(0, np.arange(1))
