"""Each vision task is measured alike on one, two and three processes: real commands, all bits compared."""

from __future__ import annotations

import csv
import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.forkserver import script_ranks
from support.sample_recipes import (
    NUM_VAL,
    NUMBER,
    PADDED,
    SCRIPTS,
    TASKS,
    predictions,
    records,
    settings_kept,
    write_sample,
)

from paceline import cli

KINDS = [*TASKS, *PADDED]
METRICS = {
    "detection": {"ap", "ap50", "ar100", "voc_ap50"},
    "instance_segmentation": {"mask_ap", "mask_ap50", "mask_ar100", "ap", "ap50", "ar100", "voc_ap50"},
    "keypoints": {"loss", "heatmap_mse", "pck", "pck.neck", "pckh", "ap", "ap50", "ar_medium"},
    "masked_autoencoder": {"masked_mse", "knn_top1", "linear_top1"},
    "saliency": {"loss", "pixel_bce", "cel", "mae", "max_f", "weighted_f", "s_measure", "mean_e", "iou", "ber"},
    "segmentation": {"loss", "ohem_cross_entropy", "dice_loss", "miou", "iou.disc", "pixel_accuracy", "boundary_f"},
    "transformers": {"ap", "ap50", "ar100", "voc_ap50"},
    "video": {"loss", "cross_entropy", "top1", "top2", "auroc"},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each task in folders `1`, `2` and `3`, measured there by that number of processes."""
    folder = tmp_path_factory.mktemp("measured")
    with settings_kept():
        for kind in KINDS:
            recipe = write_sample(kind, folder)
            assert cli.main(["train", str(recipe), "train.steps=3", "--out", str(folder / "trained" / kind)]) == 0
        for procs in (1, 2, 3):
            shutil.copytree(folder / "trained", folder / str(procs), symlinks=True)
            for case in KINDS:
                shutil.rmtree(folder / str(procs) / case / "predictions", ignore_errors=True)
            measure(folder / str(procs), procs)
    return folder


def measure(folder: Path, procs: int) -> None:
    """Measure the run of each task; the same processes do all of them, since to start some costs the most."""
    runs = [str(folder / case) for case in KINDS]
    words = [["eval", run, "--json"] for run in runs]
    if procs == 1:
        for command, run in zip(words, runs, strict=True):
            with (Path(run) / "printed-0").open("w", encoding="utf-8") as file, redirect_stdout(file):
                assert cli.main(command) == 0
        return
    commands = folder / "commands.json"
    commands.write_text(json.dumps(list(zip(words, runs, strict=True))), encoding="utf-8")
    done = script_ranks(procs, SCRIPTS / "commands_in_turn.py", commands)
    assert [each.returncode for each in done] == [0] * procs, done[0].stderr


@pytest.mark.parametrize("kind", KINDS)
def test_one_two_and_three_processes_find_the_same_metrics(kind: str, measured: Path) -> None:
    alone, two, three = (answer(measured / procs / kind) for procs in "123")
    # Of keypoints a person is a sample; an image has one or two.
    assert alone["num_samples"] == NUM_VAL if kind != "keypoints" else alone["num_samples"] > NUM_VAL
    assert set(alone["metrics"]) >= METRICS[kind.removeprefix("padded_")]
    in_training = next(each for each in records(measured / "trained" / kind) if each["split"] == "val")
    assert alone["metrics"].items() <= in_training.items()
    assert two == alone
    assert three == alone


@pytest.mark.parametrize("kind", ["padded_saliency", "saliency", "segmentation"])
def test_one_two_and_three_processes_save_the_same_predictions(kind: str, measured: Path) -> None:
    alone, two, three = (predictions(measured / procs / kind) for procs in "123")
    maps = [np.asarray(Image.open(io.BytesIO(file))) for file in alone.values()]
    assert len(maps) == NUM_VAL
    assert all(len(np.unique(saved)) > 1 for saved in maps)
    sizes = {saved.shape for saved in maps}
    assert len(sizes) == NUM_VAL if "saliency" in kind else sizes == {(96, 128)}
    assert two == alone
    assert three == alone


def test_one_two_and_three_processes_write_the_same_detections(measured: Path) -> None:
    alone, two, three = (predictions(measured / procs / "detection") for procs in "123")
    rows = json.loads(alone["val.json"])
    assert {row["image_id"] for row in rows} <= set(range(NUMBER - NUM_VAL, NUMBER))
    assert {row["category_id"] for row in rows} <= {1, 2, 3}
    assert all(Path(row["file_name"]).is_file() and min(row["bbox"][2:]) > 0 for row in rows)
    assert two == alone
    assert three == alone


def test_one_two_and_three_processes_write_the_same_instances(measured: Path) -> None:
    alone, two, three = (predictions(measured / procs / "instance_segmentation") for procs in "123")
    rows = json.loads(alone.pop("val.json"))
    assert rows
    assert all(row["segmentation"]["size"] == [128, 160] and row["segmentation"]["counts"] for row in rows)
    ids = [np.asarray(Image.open(io.BytesIO(file))) for file in alone.values()]
    assert [each.dtype for each in ids] == [np.uint16] * NUM_VAL
    alone["val.json"] = predictions(measured / "1" / "instance_segmentation")["val.json"]
    assert two == alone
    assert three == alone


def test_one_two_and_three_processes_write_the_same_keypoints(measured: Path) -> None:
    alone, two, three = (predictions(measured / procs / "keypoints") for procs in "123")
    rows = json.loads(alone["val.json"])
    people = json.loads((measured / "keypoints" / "val.json").read_text())["annotations"]
    assert [row["image_id"] for row in rows] == [person["image_id"] for person in people]
    assert all(Path(row["file_name"]).is_file() and len(row["keypoints"]) == 3 * 14 for row in rows)
    assert {row["category_id"] for row in rows} == {1}
    assert two == alone
    assert three == alone


def test_one_two_and_three_processes_write_the_same_table(measured: Path) -> None:
    alone, two, three = (predictions(measured / procs / "video") for procs in "123")
    rows = list(csv.DictReader(io.StringIO(alone["val.csv"].decode())))
    assert [row["sample"] for row in rows] == [str(number) for number in range(NUM_VAL)]
    assert len({row["path"] for row in rows}) == NUM_VAL
    assert all(Path(row["path"]).is_file() for row in rows)
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert right / NUM_VAL == answer(measured / "1" / "video")["metrics"]["top1"]
    assert two == alone
    assert three == alone


def answer(run: Path) -> dict[str, Any]:
    """What the command printed of a run, but for where the run is."""
    found: dict[str, Any] = json.loads((run / "printed-0").read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name != "checkpoint"}
