"""The recipes of masked pretraining, finetuning and linear probing: as published, and from one run to the next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sample_recipes import records, settings_kept

import paceline
from paceline.cli import main

# He et al., "Masked Autoencoders Are Scalable Vision Learners", 2022, tables 8 to 10, for ViT-B.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mae_vit_base": {
        "batch_size": 4096,
        "lr": 1.5e-4 * 4096 / 256,
        "epochs": 800,
        "warmup_epochs": 40,
        "optimizer": {"name": "adamw", "weight_decay": 0.05, "betas": [0.9, 0.95], "layer_decay": None},
        "random_masking": {"num_patches": (224 // 16) ** 2, "mask_ratio": 0.75},
        "random_resized_crop": {"size": 224, "scale": [0.2, 1.0]},
    },
    "mae_vit_base_finetune": {
        "batch_size": 1024,
        "lr": 1e-3 * 1024 / 256,
        "epochs": 100,
        "warmup_epochs": 5,
        "optimizer": {"name": "adamw", "weight_decay": 0.05, "betas": [0.9, 0.999], "layer_decay": 0.75},
        "mixup_or_cutmix": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0},
        "rand_augment": {"num_ops": 2, "magnitude": 30 * 9 / 10},
    },
    "mae_vit_base_linear_probe": {
        "batch_size": 16384,
        "lr": 0.1 * 16384 / 256,
        "epochs": 90,
        "warmup_epochs": 10,
        "optimizer": {"name": "sgd", "momentum": 0.9, "layer_decay": None},
        "random_resized_crop": {"size": 224},
    },
}
SHORT = ["train.epochs=null", "train.steps=2", "train.threads=1", "logging.images=false"]
SHORT += ["schedule.warmup_epochs=null", "schedule.warmup_steps=1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    with settings_kept():
        yield


def run(command: str, recipe: str, *changes: str) -> None:
    assert main([command, recipe, *changes]) == 0


def evaluated(name: str) -> dict[str, Any]:
    """The metrics of the last evaluation."""
    return [each for each in records(Path("runs") / name) if each["split"] == "val"][-1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_settings_are_those_of_the_paper(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("show", name, "model.num_classes=1000", "--json")
    printed, expected = json.loads(capsys.readouterr().out), PUBLISHED[name]
    recipe, sizes = printed["recipe"], {layer["name"]: layer["parameters"] for layer in printed["model"]["layers"]}
    assert printed["batch"]["global"] == expected["batch_size"]
    assert printed["batch"]["lr"] == pytest.approx(expected["lr"])
    assert recipe["train"]["epochs"] == expected["epochs"]
    assert recipe["schedule"]["warmup_epochs"] == expected["warmup_epochs"]
    assert {key: recipe["optimizer"].get(key) for key in expected["optimizer"]} == expected["optimizer"]
    transforms = {each["name"]: each for each in recipe["data"]["train"]["transforms"]}
    for transform in ("random_masking", "random_resized_crop", "mixup_or_cutmix", "rand_augment"):
        given = expected.get(transform, {})
        assert {key: transforms[transform][key] for key in given} == given
    # 86,567,656 is ViT-B with a head of 1000 classes; MAE's decoder has 26,109,184, fixed positions included.
    whole = {"mae_vit_base": 85_798_656 + 26_109_184 - 197 * 512}.get(name, 86_567_656)
    assert printed["model"]["parameters"] == whole
    assert sizes.get("encoder", whole - 769_000) == 85_798_656


def test_finetuning_scales_the_learning_rate_of_each_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """14 layers of two groups each, with weight decay and without."""
    run("show", "mae_vit_base_finetune", "model.num_classes=1000", "--json")
    groups = json.loads(capsys.readouterr().out)["groups"]
    layer_of = {"cls_token": 0, "patch_embed.proj.weight": 0, "fc_norm.weight": 13, "head.weight": 13}
    layer_of |= {f"blocks.{block}.mlp.fc1.weight": block + 1 for block in range(12)}
    scales = {name: group["lr_scale"] for group in groups for name in group["names"]}
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert len(groups) == 28
    assert {name: scales[name] for name in layer_of} == pytest.approx(
        {n: 0.75 ** (13 - k) for n, k in layer_of.items()}
    )
    assert [decays[name] for name in ("pos_embed", "blocks.3.norm1.weight", "head.bias", "head.weight")] == [
        0,
        0,
        0,
        0.05,
    ]


def test_the_published_chain_fits_together() -> None:
    """With a small ViT, on images of another data set: what pretraining saves is what the others load."""
    assert main(["sample", "classification", "images", "--number", "12"]) == 0
    splits = [f"data.{split}.{key}" for split in ("train", "val") for key in ("root=images", f"split={split}")]
    shares = [f"data.{split}.split_shares={{train: 0.7, val: 0.3}}" for split in ("train", "val")]
    small = [*splits, *shares, "data.batch_size=4", "data.num_workers=0", "train.micro_batch_size=2", *SHORT]
    small += ["train.precision=fp32", "evaluate={}"]
    vit = "{embed_dim: 32, depth: 2, num_heads: 2"
    run("train", "mae_vit_base", f"model.encoder_args={vit}}}", "model.decoder_depth=1", "model.decoder_dim=32", *small)
    run("train", "mae_vit_base_finetune", f"model.args={vit}, global_pool: avg, drop_path_rate: 0.1}}", *small)
    run("train", "mae_vit_base_linear_probe", f"model.args={vit}}}", *small)
    assert {"masked_mse", "knn_top1", "linear_top1"} <= evaluated("mae_vit_base").keys()
    for name in ("mae_vit_base_finetune", "mae_vit_base_linear_probe"):
        assert evaluated(name)["num_samples"] == 4


def test_the_chain_of_fashion_mnist_takes_the_first_run_as_weights() -> None:
    """With fewer channels, on the embedded images."""
    vit = "img_size: 28, patch_size: 7, embed_dim: 48, depth: 3, num_heads: 3"
    folder = Path(paceline.__file__).parent / "data/embedded/fashion"
    changes = [f"data.{split}.root={json.dumps(str(folder))}" for split in ("train", "val")] + SHORT
    run("train", "mae_fashion", f"model.encoder_args={{{vit}}}", *changes)
    for name in ("mae_fashion_finetune", "mae_fashion_linear_probe"):
        run("train", name, f"model.args={{{vit}, global_pool: avg, fc_norm: false}}", *changes)
        assert evaluated(name)["num_samples"] == 2000
