"""Finetuning in full: everything of the recipe together, on classifiers of several families."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from support.sample_recipes import records, settings_kept
from torch import Tensor, nn
from torch.nn.functional import interpolate

import paceline
from paceline.cli import main
from paceline.models.zoo import build_timm, build_torchvision


class Classifier(NamedTuple):
    model: nn.Module
    """What the weights come from: five classes, and images of 32 pixels where the size matters."""
    args: dict[str, Any]
    head: str
    num_layers: int


def classifier(name: str) -> Classifier:
    torch.manual_seed(0)
    library, _, member = name.partition("/")
    drop_path = {"drop_path_rate": 0.5}
    if member == "test_vit":
        small = {"embed_dim": 32, "depth": 3, "num_heads": 2}
        vit = build_timm(member, 5, 3, {**small, "img_size": 32})
        return Classifier(vit, {**small, **drop_path, "img_size": 64}, "head", 4)
    if library == "timm":
        return Classifier(build_timm(member, 5, 3), drop_path, "fc", 5)
    return Classifier(build_torchvision(member, 5, 3), {}, "classifier.1", 19)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with settings_kept():
        yield


def interpolated(positions: Tensor) -> Tensor:
    """Embeddings of a class token and 2 × 2 patches, as those of 4 × 4."""
    patches = positions[:, 1:].transpose(1, 2).reshape(1, -1, 2, 2)
    larger = interpolate(patches, size=(4, 4), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([positions[:, :1], larger.flatten(2).transpose(1, 2)], 1)


@pytest.mark.parametrize("name", ["timm/test_vit", "timm/test_resnet", "torchvision/mobilenet_v2"])
def test_everything_works_together(name: str, tmp_path: Path) -> None:
    assert main(["sample", "classification", "images", "--number", "12"]) == 0
    source = classifier(name)
    before = {key: tensor.clone() for key, tensor in source.model.state_dict().items()}
    save_file(before, "weights.safetensors")
    changes: dict[str, Any] = {
        "model.name": name,
        "model.args": None,
        "model.weights.file": "weights.safetensors",
        "data.batch_size": 4,
        "data.num_workers": 0,
        "data.train.transforms.0.size": 64,
        "data.val.transforms.0.size": 64,
        "data.val.transforms.1.size": 64,
        "schedule.warmup_epochs": None,
        "schedule.warmup_steps": 1,
        "train": {"epochs": None, "steps": 4, "threads": 1, "averaging": {"name": "ema", "decay": 0.5}},
        "logging.images": False,
    }
    changes |= {f"model.args.{key}": value for key, value in source.args.items()}
    for split in ("train", "val"):
        changes |= {f"data.{split}.split_shares": {"train": 0.7, "val": 0.3}}
    run = paceline.build("finetune", changes, tmp_path / "run")
    after = run.model.state_dict()

    body = [key for key in before if not key.startswith(source.head) and key != "pos_embed"]
    assert all(torch.equal(after[key], before[key]) for key in body)
    assert after[f"{source.head}.weight"].shape[0] == 3
    assert 0 < after[f"{source.head}.weight"].abs().max() < 1e-3
    assert not after[f"{source.head}.bias"].any()
    if "pos_embed" in before:
        torch.testing.assert_close(after["pos_embed"], interpolated(before["pos_embed"]))
    scales = {group["lr_scale"] for group in run.optimizer.param_groups}
    assert scales == {0.75**distance for distance in range(source.num_layers + 1)}
    paths = [getattr(module, "drop_prob", 0.0) for module in run.model.modules() if type(module).__name__ == "DropPath"]
    assert max(paths, default=0.5) == 0.5

    paceline.train(run)
    measured = [each for each in records(tmp_path / "run") if each["split"] == "val"][-1]
    assert measured["num_samples"] == 4
    assert {"top1", "averaged_top1", "averaged_loss"} <= measured.keys()
    assert measured["averaged_loss"] != measured["loss"]
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"
