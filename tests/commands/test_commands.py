"""The commands as a user runs them: real processes, real files, exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from support.forkserver import paceline

SMALL = [
    "model.widths=[4]",
    "train.epochs=null",
    "train.steps=4",
    "evaluate.every_steps=2",
    "checkpoint.every_steps=2",
    "schedule.warmup=none",
    "schedule.warmup_epochs=null",
    "expect.top1=0",
]


def save_images(folder: Path, classes: dict[str, int], size: tuple[int, int] = (40, 48)) -> None:
    generator = np.random.default_rng(0)
    for name, number in classes.items():
        (folder / name).mkdir(parents=True)
        for index in range(number):
            image = generator.integers(0, 255, (*size, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / name / f"{index}.jpg"), image)


def folder_recipe(folder: Path, **changes: object) -> Path:
    recipe: dict[str, object] = {
        "name": "own",
        "task": "classification",
        "model": {"name": "convnet", "widths": [4]},
        "data": {
            "batch_size": 4,
            "num_workers": 0,
            "train": {
                "dataset": "image_folder",
                "root": "train",
                "transforms": [
                    {"name": "random_resized_crop", "size": 16},
                    {"name": "normalize", "mean": [0.5], "std": [0.25]},
                ],
            },
            "val": {
                "dataset": "image_folder",
                "root": "val",
                "transforms": [
                    {"name": "resize", "size": [16, 16]},
                    {"name": "normalize", "mean": [0.5], "std": [0.25]},
                ],
            },
        },
        "losses": ["cross_entropy"],
        "optimizer": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 3},
        **changes,
    }
    path = folder / "own.json"
    path.write_text(json.dumps(recipe))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished small run."""
    folder = tmp_path_factory.mktemp("finished")
    done = paceline(folder, "train", "quickstart", *SMALL)
    assert done.returncode == 0, done.stderr
    return folder


def test_train_fills_the_run_directory(finished: Path) -> None:
    run = finished / "runs" / "quickstart"
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 4)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["split"]) for r in records] == [(2, "val"), (4, "val"), (4, "train")]
    assert {"top1", "precision", "recall", "f1", "auroc", "loss"} <= records[1].keys()
    assert set(records[2]["smoothed"]["loss"]) == {"median", "mean", "global_mean", "max", "latest"}
    assert set(records[2]["clock"]["step_time"]) == {"median", "mean", "global_mean", "max", "latest"}
    assert (run / "best").resolve().name in {"step-00000002", "step-00000004"}
    names = {path.name for path in (run / "images").iterdir()}
    assert {"train-samples-00000001.png", "val-confusion-00000002.png", "val-predictions-00000004.png"} <= names
    assert list((run / "tensorboard").iterdir())


def test_train_again_says_that_it_is_finished(finished: Path) -> None:
    again = paceline(finished, "train", "quickstart", *SMALL)
    assert again.returncode == 0
    assert "is finished" in again.stderr


def test_a_changed_recipe_is_refused_with_both_values(finished: Path) -> None:
    refused = paceline(finished, "train", "quickstart", *SMALL, "optimizer.lr=0.5")
    assert refused.returncode == 4
    assert "optimizer.lr: was 0.003, is 0.5" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_more_steps_continue_and_fresh_keeps_the_earlier_run(tmp_path: Path) -> None:
    assert paceline(tmp_path, "train", "quickstart", *SMALL).returncode == 0
    longer = paceline(tmp_path, "train", "quickstart", *SMALL, "train.steps=6")
    assert longer.returncode == 0, longer.stderr
    assert "step-00000004" in longer.stderr
    fresh = paceline(tmp_path, "train", "quickstart", *SMALL, "--fresh", "optimizer.lr=0.5")
    assert fresh.returncode == 0, fresh.stderr
    assert json.loads((tmp_path / "runs/quickstart~1/status.json").read_text())["step"] == 6
    assert json.loads((tmp_path / "runs/quickstart/status.json").read_text())["step"] == 4


def test_from_starts_a_new_directory_at_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    start = finished / "runs/quickstart/checkpoints/step-00000002"
    done = paceline(tmp_path, "train", "quickstart", *SMALL, "--from", str(start), "--out", "second")
    assert done.returncode == 0, done.stderr
    first = (finished / "runs/quickstart/checkpoints/step-00000004/model.safetensors").read_bytes()
    second = (tmp_path / "second/checkpoints/step-00000004/model.safetensors").read_bytes()
    assert first == second


def test_from_never_overwrites_newer_steps(finished: Path) -> None:
    start = finished / "runs/quickstart/checkpoints/step-00000002"
    refused = paceline(finished, "train", "quickstart", *SMALL, "--from", str(start))
    assert refused.returncode == 4
    assert "--out" in refused.stderr


def test_eval_of_a_run_gives_the_metrics_of_training(finished: Path) -> None:
    answer = paceline(finished, "eval", "runs/quickstart", "--checkpoint", "runs/quickstart", "--json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    records = [json.loads(line) for line in (finished / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    assert found["step"] == 4
    assert found["num_samples"] == 2000
    assert found["metrics"] == {name: records[1][name] for name in found["metrics"]}


def test_eval_reads_a_recipe_or_a_run_the_same(finished: Path) -> None:
    by_run = paceline(finished, "eval", "runs/quickstart", "--json")
    by_recipe = paceline(finished, "eval", "quickstart", *SMALL, "--json")
    assert json.loads(by_run.stdout)["metrics"] == json.loads(by_recipe.stdout)["metrics"]


def test_eval_without_a_checkpoint(tmp_path: Path) -> None:
    answer = paceline(tmp_path, "eval", "quickstart")
    assert answer.returncode == 4
    assert "no checkpoint" in answer.stderr


def test_eval_of_a_run_that_is_not_there(finished: Path) -> None:
    answer = paceline(finished, "eval", "runs/nothere")
    assert answer.returncode == 2
    assert "no such run directory" in answer.stderr


def test_eval_prints_metrics_in_two_columns_and_where_predictions_are(tmp_path: Path) -> None:
    """Also names that are long, and counts as whole numbers."""
    (tmp_path / "mine.py").write_text(
        """
import torch
from paceline import register


@register.metric("seen")
class Seen:
    def update(self, predictions, batch):
        return {"seen": torch.tensor(len(predictions))}

    def compute(self, state):
        return {"samples_that_were_seen": int(state["seen"]), "all": 1.0}
"""
    )
    save_images(tmp_path / "train", {"a": 4, "b": 4})
    save_images(tmp_path / "val", {"a": 3, "b": 2})
    recipe = folder_recipe(tmp_path, evaluate={"metrics": ["seen"], "save_predictions": True})
    done = paceline(tmp_path, "train", str(recipe), "--use", "mine")
    assert done.returncode == 0, done.stderr
    assert "predictions  runs/own/predictions" in done.stderr
    assert "paceline eval runs/own\n" in done.stderr
    answer = paceline(tmp_path, "eval", "runs/own")
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert "samples_that_were_seen  5" in lines
    assert "all                     1.0000" in lines
    assert len({len(line) - len(line.split()[-1]) for line in lines}) == 1
    assert answer.stderr.splitlines()[-1] == "predictions are in runs/own/predictions/val.csv"
    table = (tmp_path / "runs/own/predictions/val.csv").read_text().splitlines()
    assert table[0] == "sample,path,label,predicted,probability,a,b"
    rows = [line.split(",") for line in table[1:]]
    assert [Path(row[1]) for row in rows] == sorted((tmp_path / "val").rglob("*.jpg"))
    assert [(row[0], row[2]) for row in rows] == [("0", "a"), ("1", "a"), ("2", "a"), ("3", "b"), ("4", "b")]
    shutil.rmtree(tmp_path / "runs/own/predictions")
    (tmp_path / "runs/own/predictions").touch()
    answer = paceline(tmp_path, "eval", "runs/own")
    assert (answer.returncode, answer.stdout.splitlines()) == (2, lines)
    assert "runs/own/predictions/val.csv: the prediction cannot be written (" in answer.stderr


def test_check_tries_the_last_and_smallest_update(tmp_path: Path) -> None:
    """BatchNorm cannot learn from one value a channel, which only the last image of an epoch has."""
    (tmp_path / "mine.py").write_text(
        """
from torch import nn
from paceline import register


@register.model("pooled")
def pooled(num_classes, in_channels):
    norm = nn.BatchNorm2d(in_channels)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), norm, nn.Flatten(), nn.Linear(in_channels, num_classes))
"""
    )
    save_images(tmp_path / "train", {"a": 3, "b": 2})
    save_images(tmp_path / "val", {"a": 1, "b": 1})
    recipe = folder_recipe(tmp_path, model={"name": "pooled"})
    answer = paceline(tmp_path, "check", str(recipe), "--use", "mine")
    assert answer.returncode == 2, answer.stderr
    assert "of 16×16 pixels: Expected more than 1 value per channel" in answer.stderr
    assert "data.drop_last" in answer.stderr
    for mended in ("data.drop_last=true", "data.batch_size=6", "train.steps=1"):
        again = paceline(tmp_path, "check", str(recipe), "--use", "mine", mended)
        assert again.returncode == 0, again.stderr
        assert ("data.batch_size: 6 is more than the 5 samples" in again.stderr) == (mended == "data.batch_size=6")


def test_check_tries_everything_and_leaves_nothing(tmp_path: Path) -> None:
    answer = paceline(tmp_path, "check", "quickstart", *SMALL, "--json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["ok"] is True
    assert found["data"]["train"] == {"samples": 6000, "image": [1, 28, 28]}
    assert found["checkpoint"]["bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_check_names_the_metrics_and_the_best_that_is_none_of_them(tmp_path: Path) -> None:
    answer = paceline(tmp_path, "check", "quickstart", *SMALL, "checkpoint.best=top_1")
    assert answer.returncode == 2
    assert 'command line: checkpoint.best: unknown metric "top_1"; did you mean "top1"' in answer.stderr
    answer = paceline(tmp_path, "check", "quickstart", *SMALL, "task.top_k=[1,11]", "checkpoint.best=top11")
    assert (answer.returncode, answer.stdout.splitlines()[-1]) == (0, "all good")
    assert "\nmetrics     cross_entropy, loss, top1, " in answer.stdout
    assert "command line: checkpoint.best: the first samples have no metric 'top11'" in answer.stderr


def test_show_tells_origins_model_and_batch(tmp_path: Path) -> None:
    answer = paceline(tmp_path, "show", "quickstart", "data.batch_size=100", "train.micro_batch_size=50", "--json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["origins"]["data.batch_size"] == "command line"
    assert found["origins"]["train.seed"] == "default"
    assert found["origins"]["optimizer.lr"].startswith("paceline/recipes/classification/quickstart.yaml:")
    assert found["batch"]["micro_batches"] == 2
    assert found["batch"]["steps_per_epoch"] == 60
    # one 3×3 convolution 1→32 at 28×28 is 2·9·32·784 FLOPs; the table's stages must add up to the whole
    layers = {row["name"]: row for row in found["model"]["layers"]}
    assert layers["stages"]["flops"] + layers["head"]["flops"] == found["model"]["flops_per_sample"]
    assert layers["head"]["flops"] == 2 * 128 * 10
    assert list(tmp_path.iterdir()) == []


def test_the_resolved_recipe_can_be_used_again(finished: Path) -> None:
    again = paceline(finished, "show", "runs/quickstart", "--json")
    assert again.returncode == 0, again.stderr
    before = paceline(finished, "show", "quickstart", *SMALL, "--json")
    assert json.loads(again.stdout)["recipe"] == json.loads(before.stdout)["recipe"]


def test_an_image_folder_trains(tmp_path: Path) -> None:
    save_images(tmp_path / "train", {"ant": 5, "bee": 6})
    save_images(tmp_path / "val", {"ant": 2, "bee": 3})
    done = paceline(tmp_path, "train", str(folder_recipe(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert "the last step of an epoch has 3" in done.stderr


def nothing(folder: Path) -> None:
    """No data at all."""


def empty_root(folder: Path) -> None:
    (folder / "train").mkdir()


def other_classes(folder: Path) -> None:
    save_images(folder / "train", {"ant": 2, "bee": 2})
    save_images(folder / "val", {"ant": 2})


def unreadable_image(folder: Path) -> None:
    save_images(folder / "train", {"ant": 2, "bee": 2})
    save_images(folder / "val", {"ant": 2, "bee": 2})
    for index in range(2):
        (folder / "train" / "ant" / f"{index}.jpg").write_bytes(b"\xff\xd8\xffnot a image")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (nothing, ["own.json:1:", "data.train.root", "train does not exist"]),
        (empty_root, ["data.train", "train"]),
        (other_classes, ["data.val has 1 class and data.train has 2", "bee"]),
        (unreadable_image, ["train/ant/"]),
    ],
)
def test_bad_data_is_named(tmp_path: Path, prepare: Callable[[Path], None], words: list[str]) -> None:
    prepare(tmp_path)
    folder_recipe(tmp_path)
    done = paceline(tmp_path, "train", "own.json")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_class_count_that_does_not_match(tmp_path: Path) -> None:
    done = paceline(tmp_path, "train", "quickstart", "model.num_classes=7")
    assert done.returncode == 2
    assert "model.num_classes: expected 10, the number of classes in data.train, got 7" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_output_directory_that_cannot_be_written(tmp_path: Path) -> None:
    done = paceline(tmp_path, "train", "quickstart", "--out", "/proc/runs")
    assert done.returncode == 2
    assert "/proc" in done.stderr
    assert "--out" in done.stderr
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = paceline(tmp_path, "train", "quickstart", "--out", str(blocked / "run"))
    assert done.returncode == 2
    assert str(blocked) in done.stderr


def test_multi_label_with_a_data_set_and_a_metric_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
import numpy as np
import torch
from paceline import register
from paceline.metrics.metric import State


@register.dataset("dots")
class Dots:
    classes = ["left", "right"]
    channels = 1

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> dict[str, object]:
        image = np.zeros((8, 8, 1), np.uint8)
        label = np.array([index % 2, index // 2 % 2], np.float32)
        image[:, :4] += np.uint8(200 * label[0])
        image[:, 4:] += np.uint8(200 * label[1])
        return {"image": image, "label": label}


@register.metric("seen")
class Seen:
    def update(self, predictions, batch) -> State:
        return {"seen": torch.tensor(len(predictions))}

    def compute(self, state: State) -> dict[str, float]:
        return {"seen": float(state["seen"])}
"""
    )
    recipe = {
        "name": "dots",
        "task": {"name": "classification", "multi_label": True},
        "model": {"name": "convnet", "widths": [8]},
        "data": {
            "batch_size": 8,
            "num_workers": 0,
            "train": {
                "dataset": "dots",
                "size": 64,
                "transforms": [{"name": "normalize", "mean": [0.5], "std": [0.25]}],
            },
            "val": {"dataset": "dots", "transforms": [{"name": "normalize", "mean": [0.5], "std": [0.25]}]},
        },
        "losses": ["bce"],
        "optimizer": {"name": "adamw", "lr": 0.02},
        "train": {"epochs": 8},
        "evaluate": {"metrics": ["seen"], "batch_size": 16},
    }
    (tmp_path / "dots.json").write_text(json.dumps(recipe))
    done = paceline(tmp_path, "train", "dots.json", "--use", "mine")
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "runs/dots/metrics.jsonl").read_text().splitlines()[-2])
    assert last["seen"] == 40
    assert last["f1"] == 1.0
    unknown = paceline(tmp_path, "check", "dots.json")
    assert unknown.returncode == 2
    assert "data.train.dataset" in unknown.stderr


def test_losses_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    done = paceline(
        tmp_path, "train", "quickstart", *SMALL, "optimizer.name=sgd", "optimizer.lr=1e30", "train.steps=20"
    )
    assert done.returncode == 1
    assert "not finite" in done.stderr
    assert "Traceback" not in done.stderr
    status = json.loads((tmp_path / "runs/quickstart/status.json").read_text())
    assert status["state"] == "failed"
    assert done.stderr.count(status["reason"]) == 1
    assert done.stderr.splitlines()[-2:] == [
        "  nothing was saved in runs/quickstart yet; run the same command to start again",
        status["reason"],
    ]
    assert (tmp_path / "runs/quickstart/logs/rank-0.log").read_text().count(status["reason"]) == 1


def test_recipes_and_schema(tmp_path: Path) -> None:
    names = [row["name"] for row in json.loads(paceline(tmp_path, "recipes", "--json").stdout)["recipes"]]
    assert {"quickstart", "fashion", "hymenoptera", "image_folder"} <= set(names)
    schema = json.loads(paceline(tmp_path, "schema").stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
