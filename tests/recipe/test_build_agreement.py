"""Processes that have read different recipes, data or weights end alike, and say what is different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import safetensors.torch
import torch
from support.forked import WORLD, in_processes

from paceline.checkpoint.store import Store
from paceline.core.world import World
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.split_loader import SplitLoader
from paceline.recipe.build import Builder
from paceline.recipe.build_context import check_data, read_weights_together
from paceline.recipe.load import load
from paceline.recipe.validate import validate

RECIPE: dict[str, Any] = {
    "name": "agreed",
    "task": "classification",
    "model": {"name": "convnet", "widths": [4]},
    "data": {"batch_size": 64, "train": {"dataset": "fashion_small", "split": "test"}},
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"steps": 1, "reproducible": "world"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    return tmp_path


def builder(world: World, *overrides: str) -> Builder:
    return Builder(validate(load("recipe.json", overrides)), world)


def images(folder: Path, number: int) -> None:
    (folder / "one").mkdir(parents=True)
    for index in range(number):
        cv2.imwrite(str(folder / f"one/{index}.png"), np.full((16, 16, 3), index, dtype=np.uint8))


def assert_all_end(found: list[list[Any]], code: int, *words: str) -> None:
    assert found == [found[0]] * WORLD
    assert found[0][0] == code
    assert found[0][1].startswith(f"process 2 of {WORLD}: ")
    assert [word for word in words if word not in found[0][1]] == []


def test_the_same_recipe_data_and_weights_are_built(folder: Path) -> None:
    store = Store(folder / "run/checkpoints", best="top1")
    model = builder(World(0, 1, 0, torch.device("cpu"))).run(folder / "out").model
    store.save(7, model.state_dict(), {}, {"top1": 0.5})

    def work(world: World) -> Any:
        return builder(world, "model.weights=run/best").run(folder / "out").state.recipe["model"]["weights"]

    assert in_processes(folder / "ranks", work) == [str(store.path_of(7))] * WORLD


def test_another_recipe(folder: Path) -> None:
    def work(world: World) -> str:
        builder(world, f"optimizer.lr={0.1 + world.rank // 2}")
        return "built"

    found = in_processes(folder / "ranks", work)
    assert_all_end(found, 2, "optimizer.lr", "1.1", "0.1")


def test_other_data(folder: Path) -> None:
    for rank in range(WORLD):
        images(folder / f"images-{rank}", 8 + rank // 2)

    def work(world: World) -> str:
        dataset = ImageFolder(folder / f"images-{world.rank}")
        check_data(builder(world), {"train": SplitLoader(dataset, [], 0)})
        return "built"

    assert_all_end(in_processes(folder / "ranks", work), 3, "data", "train: 8 samples became 9")


def test_other_weights(folder: Path) -> None:
    for rank in range(WORLD):
        weights = {"features.0.weight": torch.full((2,), float(rank // 2))}
        safetensors.torch.save_file(weights, folder / f"{rank}.safetensors")

    def work(world: World) -> Any:
        return len(read_weights_together(builder(world), lambda: folder / f"{world.rank}.safetensors").tensors)

    assert_all_end(in_processes(folder / "ranks", work), 4, "0.safetensors", "is not what the first process read")
