"""Names of files and folders that are not UTF-8: read as any other, and escaped where they are shown."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from video_files import write_video

from paceline.core.errors import DataError
from paceline.data.datasets.coco import Coco
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.datasets.image_mask import ImageMask
from paceline.data.datasets.keypoints import Keypoints
from paceline.data.datasets.video import VideoFolder
from paceline.data.datasets.voc import Voc
from paceline.data.pack import PackedSamples, write_pack

ODD = os.fsdecode(b"\xff\xfe")


def paint(path: Path, value: int = 255) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        Image.new("L", (8, 8), value).save(file, path.suffix[1:])
    return path


def test_every_data_set_reads_them(tmp_path: Path) -> None:
    root = tmp_path / ODD
    for folder in ("photos/cat", "images", "masks", "JPEGImages"):
        paint(root / folder / f"{ODD}.png")
    (root / "Annotations").mkdir()
    (root / f"Annotations/{ODD}.xml").write_text("<annotation/>")
    np.save(root / "joints.npy", np.arange(28).reshape(1, 14, 2) / 4)
    image = {"id": 1, "file_name": f"{ODD}.png", "width": 8, "height": 8}
    content = {"categories": [{"id": 1, "name": ODD}], "images": [image], "annotations": []}
    (root / "all.json").write_text(json.dumps(content))
    for dataset in (
        ImageFolder(root / "photos"),
        ImageMask(root, binary=True),
        Voc(root, classes=["cat"]),
        Coco(root, "all.json"),
        Keypoints(root),
    ):
        assert dataset.path(0).name == f"{ODD}.png"
        assert int(dataset.read(0)["image"].min()) == 255
    video = root / f"videos/{ODD}/{ODD}.mp4"
    video.parent.mkdir(parents=True)
    write_video(tmp_path / "video.mp4", num_frames=3).rename(video)
    videos = VideoFolder(root / "videos")
    assert videos.classes == [ODD]
    assert videos.read(0)["image"].num_frames == 3


def test_a_pack_keeps_the_names_of_classes(tmp_path: Path) -> None:
    paint(tmp_path / f"photos/{ODD}/0.png")
    bad = paint(tmp_path / f"photos/{ODD}/{ODD}.png")
    bad.write_bytes(b"no image")
    path = write_pack(ImageFolder(tmp_path / "photos"), tmp_path / f"{ODD}.pack", None, max_skipped=1).path
    found = PackedSamples(path)
    assert found.classes == [ODD]
    assert int(found.read(0)["image"].min()) == 255
    assert [(each.sample, each.path) for each in found.skipped] == [(1, str(bad))]
    path.write_bytes(path.read_bytes().replace(b'"classes": ["', b'"classes": [7,"'))
    with pytest.raises(DataError):
        PackedSamples(path)


RECIPE = """
name: names
task: classification
model: {name: convnet, widths: [4]}
data:
  batch_size: 4
  on_error: skip
  max_skipped: 1
  train: {dataset: image_folder, root: photos}
  val: {dataset: image_folder, root: photos}
losses: [cross_entropy]
optimizer: {name: sgd, lr: 0.1}
train: {epochs: 1, threads: 1}
evaluate: {save_predictions: true}
"""
COMMANDS = """
import os
from contextlib import redirect_stdout
from paceline.cli import main
out = os.fsdecode(b"run\\xff")
with redirect_stdout(open("notes.txt", "w")):
    assert main(["train", "recipe.yaml", "--out", out]) == 0
    assert main(["train", "recipe.yaml", "--out", out]) == 0
    assert main(["data", "recipe.yaml", "--sheet", out + ".png"]) == 3
main(["eval", out, "--json"])
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, str]:
    """Trained, found finished, looked at and evaluated in one process, in a folder whose name is not UTF-8."""
    folder = tmp_path_factory.mktemp("names") / ODD
    for number in range(6):
        paint(folder / "photos" / ("a" if number % 2 else f"b{ODD}") / f"{number}{ODD}.png", 40 * number)
    (folder / f"photos/a/bad{ODD}.png").write_bytes(b"no image")
    (folder / "recipe.yaml").write_text(RECIPE)
    words = [sys.executable, "-c", COMMANDS]
    done = subprocess.run(words, cwd=folder, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder, json.loads(done.stdout), done.stderr.decode()


def test_a_run_goes_on_and_is_found_again(project: tuple[Path, Any, str]) -> None:
    folder, answer, errors = project
    assert answer["metrics"]["loss"] > 0
    assert (answer["num_samples"], answer["num_skipped"]) == (6, 1)
    assert "is finished: 2 of 2 steps are done" in errors
    assert (folder / os.fsdecode(b"run\xff.png")).stat().st_size > 0


def test_all_that_is_written_is_utf8(project: tuple[Path, Any, str]) -> None:
    folder, _, errors = project
    run = folder / os.fsdecode(b"run\xff")
    log = (run / "logs/rank-0.log").read_text(encoding="utf-8")
    for text in (log, errors, (folder / "notes.txt").read_text(encoding="utf-8")):
        assert "bad\\udcff\\udcfe.png" in text
    skipped = [json.loads(line) for line in (run / "skipped.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {Path(each["path"]) for each in skipped} == {folder / f"photos/a/bad{ODD}.png"}
    with (run / "predictions/val.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["label"] for row in rows} == {"a", "b\\udcff\\udcfe"}
    assert rows[0]["path"].endswith("photos/a/1\\udcff\\udcfe.png")
    for name in ("recipe.yaml", "status.json", "metrics.jsonl", "checkpoints/index.json"):
        (run / name).read_text(encoding="utf-8")
