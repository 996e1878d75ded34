"""A step of DETRs over micro-batches and processes: real commands, the weights afterwards compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.forkserver import paceline_ranks
from support.sample_recipes import records, settings_kept, small_recipe, write_sample

from paceline import cli
from paceline.core.errors import missing_extra

pytestmark = pytest.mark.skipif(bool(missing_extra("transformers")), reason=missing_extra("transformers"))

# BatchNorm's statistics are those of a micro-batch: whatever has them is frozen.
_WITH_STATISTICS = ["backbone", "encoder", "encoder_input_proj"]
_RF_DETR: dict[str, Any] = {
    "args": {"d_model": 16, "num_queries": 6, "group_detr": 2, "decoder_ffn_dim": 16, "decoder_layers": 2}
    | {"decoder_cross_attention_heads": 4, "dropout": 0.0, "c2f_num_blocks": 1},
    "backbone_args": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "out_indices": [1, 2]}
    | {"image_size": 64, "patch_size": 8, "num_windows": 2},
}


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    with settings_kept():
        yield


def recipe_of(name: str, data: Path) -> dict[str, Any]:
    """Two steps of 8 images without anything drawn for a micro-batch: no dropout, no noise."""
    recipe = small_recipe("transformers", data)
    resize, normalize = recipe["data"]["val"]["transforms"]
    recipe["data"]["train"]["transforms"] = [resize, normalize]
    recipe["data"] |= {"batch_size": 8, "val": None}
    recipe["optimizer"] = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    recipe["train"] = {"steps": 2, "device": "cpu", "threads": 1, "clip_grad_norm": 1.0}
    recipe |= {"checkpoint": {"every_steps": 2}, "evaluate": {}}
    if name == "d_fine":
        recipe["model"]["args"] |= {"dropout": 0.0, "num_denoising": 0}
        recipe["model"]["freeze"] = [f"detector.model.{each}.*" for each in _WITH_STATISTICS]
    else:
        recipe["model"] = {"name": f"transformers/{name}", **_RF_DETR}
    return recipe


@pytest.mark.parametrize("name", ["d_fine", "rf_detr"])
def test_a_step_is_the_same_over_micro_batches_and_over_processes(name: str, tmp_path: Path) -> None:
    data = write_sample("transformers", tmp_path).with_suffix("")
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe_of(name, data)), encoding="utf-8")
    for size in (8, 2):
        words = ["train", str(path), f"train.micro_batch_size={size}", "--out", str(tmp_path / f"run{size}")]
        assert cli.main(words) == 0
    done = paceline_ranks(2, tmp_path, "train", path, "train.micro_batch_size=4", "--out", "run4")
    assert [each.returncode for each in done] == [0, 0], done[0].stderr

    whole, *others = (
        load_file(tmp_path / f"run{size}/checkpoints/step-00000002/model.safetensors") for size in (8, 2, 4)
    )
    for other in others:
        far = max(float((other[key] - value).abs().max()) for key, value in whole.items() if value.is_floating_point())
        assert far <= 1e-5
    steps = [[each for each in records(tmp_path / f"run{size}") if each["split"] == "train"] for size in (8, 2, 4)]
    for step, *same in zip(*steps, strict=True):
        losses = {key: value for key, value in step.items() if key.startswith("loss")}
        assert losses["loss"] > 1
        for other in same:
            assert {key: other[key] for key in losses} == pytest.approx(losses, rel=1e-4, abs=1e-6)
