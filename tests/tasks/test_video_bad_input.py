"""Bad videos, lists and recipes of video classification, through the commands: named, and skipped where asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from spoiled import NORMALIZE, RESIZE, Spoiled, copy_of

from paceline.cli import main

CLASSES = ["circling", "growing", "sideways", "vertical"]
FRAMES, STRIDE = 4, 2  # a clip spans 7 frames
LIST = {"dataset": "video_list", "classes": CLASSES}
CLIP = {"name": "clip", "num_frames": FRAMES, "stride": STRIDE}
CLIPS = {"name": "multi_clip", "num_clips": 2, "num_frames": FRAMES, "stride": STRIDE}
RECIPE: dict[str, Any] = {
    "task": "video",
    "model": {"name": "frame_pooling", "backbone": "timm/test_resnet"},
    "losses": ["cross_entropy"],
    "data": {
        "train": {**LIST, "file": "DATA/train.csv", "transforms": [CLIP, RESIZE, NORMALIZE]},
        "val": {**LIST, "file": "DATA/val.csv", "transforms": [CLIPS, RESIZE, NORMALIZE]},
    },
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos") / "video"
    assert main(["sample", "video", str(folder), "--number", "10"]) == 0
    return folder


@pytest.fixture
def spoiled(sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Spoiled:
    return copy_of(sample, tmp_path, RECIPE, capsys)


def lines(spoiled: Spoiled, split: str = "train") -> list[str]:
    return (spoiled.data / f"{split}.csv").read_text().splitlines()


def video(spoiled: Spoiled, split: str = "train", line: int = 2) -> Path:
    """The file that a line of a list names, counted from 1."""
    return spoiled.data / lines(spoiled, split)[line - 1].split(",")[0]


def write_lines(spoiled: Spoiled, split: str, rows: list[str]) -> None:
    (spoiled.data / f"{split}.csv").write_text("".join(f"{row}\n" for row in rows))


def write_video(path: Path, num_frames: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
        for number in range(num_frames):
            frame = np.full((48, 64, 3), 20 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


DAMAGED: list[tuple[Callable[[Path], Any], str]] = [
    (halve, "Invalid data found"),
    (lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)), "not a video"),
    (lambda path: path.write_bytes(b""), "the file is empty (0 bytes)"),
    (lambda path: path.write_text("a film about nothing\n" * 40), "not a video"),
    (lambda path: write_video(path, 0), "video"),
    (lambda path: path.unlink(), "no such file"),
]


@pytest.mark.parametrize(("spoil", "reason"), DAMAGED)
def test_a_video_that_cannot_be_read_is_named_with_its_line(
    spoiled: Spoiled, spoil: Callable[[Path], Any], reason: str
) -> None:
    path = video(spoiled)
    spoil(path)
    answer = spoiled.tell("check")
    assert answer.code == 3
    assert answer.last.startswith(f"{spoiled.data}/train.csv, line 2: {path}: ")
    assert reason in answer.last
    found = spoiled.tell("data")
    assert found.code == 3
    (bad,) = found.json["splits"]["train"]["bad"]
    assert (bad["sample"], bad["path"]) == (1, str(path))
    assert reason in bad["reason"]


def test_a_damaged_video_ends_a_run_or_is_left_out(spoiled: Spoiled) -> None:
    path = video(spoiled)
    path.write_bytes(b"")
    answer = spoiled.tell("train")
    assert answer.code == 3
    assert answer.last.startswith(f"{spoiled.data}/train.csv, line 2: {path}: the file is empty (0 bytes)")
    found = spoiled.skipped("train", 1, path.name, "the file is empty")
    assert (found["num_samples"], found["num_skipped"]) == (2, 0)


def test_metrics_without_a_damaged_video_are_those_of_the_others(spoiled: Spoiled) -> None:
    halve(video(spoiled, "val", 1))
    found = spoiled.skipped("val", 0, video(spoiled, "val", 1).name)
    assert (found["num_samples"], found["num_skipped"]) == (1, 1)
    write_lines(spoiled, "val", lines(spoiled, "val")[1:])
    alone = spoiled.tell("eval").json
    assert (alone["num_samples"], alone["num_skipped"]) == (1, 0)
    assert alone["metrics"] == found["metrics"]


@pytest.mark.parametrize("num_frames", [1, 3])
@pytest.mark.parametrize("short", ["loop", "last"])
def test_a_short_video_begins_again_or_stands_still(spoiled: Spoiled, short: str, num_frames: int) -> None:
    for split in ("train", "val"):
        write_video(video(spoiled, split, 1), num_frames)
        spoiled.recipe["data"][split]["transforms"][0]["short"] = short
    answer = spoiled.tell("check")
    assert answer.code == 0
    assert answer.json["data"]["train"]["image"] == [3, FRAMES, 32, 32]
    assert spoiled.tell("data").code == 0


@pytest.mark.parametrize("label", ["9", "-1", "flying", ""])
def test_a_label_of_no_class_is_named_before_anything_is_made(spoiled: Spoiled, label: str) -> None:
    rows = lines(spoiled)
    rows[1] = f"{rows[1].split(',')[0]},{label}"
    write_lines(spoiled, "train", rows)
    what = f"the label {label!r} is no class; expected one of the 4 classes" if label else "the label is empty"
    assert spoiled.refused("data.train", "train.csv, line 2: ", what) == 3
    spoiled.recipe["data"]["on_error"] = "skip"  # the list is wrong, not a file
    assert spoiled.refused("train.csv, line 2: ", what) == 3


def test_a_class_without_a_video_is_named(spoiled: Spoiled) -> None:
    write_lines(spoiled, "train", [row for row in lines(spoiled) if "growing" not in row])
    answer = spoiled.tell("train")
    assert answer.code == 0
    assert "data.train: no sample of 1 class: growing" in answer.err
    assert "data.val: no sample of 2 classes: sideways, vertical" in answer.err
    assert all(np.isfinite(metric) for metric in spoiled.tell("eval").json["metrics"].values())
    assert "no sample of 1 class: growing" in spoiled.tell("data").json["splits"]["train"]["notes"]


def test_a_folder_without_a_video_is_named_before_anything_is_made(spoiled: Spoiled) -> None:
    for path in (spoiled.data / "videos" / "growing").iterdir():
        path.unlink()
    for split in ("train", "val"):
        part = spoiled.recipe["data"][split]
        del part["file"], part["classes"]
        part |= {"dataset": "video_folder", "root": str(spoiled.data / "videos")}
    assert (
        spoiled.refused("data.train", f"{spoiled.data}/videos/growing: no videos in this class folder; expected") == 3
    )


def several_labels(spoiled: Spoiled) -> None:
    for split in ("train", "val"):
        write_lines(spoiled, split, [f"{row};vertical" for row in lines(spoiled, split)])
        spoiled.recipe["data"][split]["label_separator"] = ";"


def test_several_labels_train_with_their_own_loss_and_metrics(spoiled: Spoiled) -> None:
    several_labels(spoiled)
    spoiled.recipe |= {"task": {"name": "video", "multi_label": True}, "losses": ["bce"]}
    assert spoiled.tell("train").code == 0
    assert {"f1", "micro_f1", "exact_match", "bce"} <= spoiled.tell("eval").json["metrics"].keys()


@pytest.mark.parametrize("task", ["video", {"name": "video", "multi_label": True}])
def test_several_labels_need_a_loss_of_several(spoiled: Spoiled, task: Any) -> None:
    several_labels(spoiled)
    spoiled.recipe["task"] = task
    answer = spoiled.tell("check")
    assert answer.code == 3
    assert [part for part in ("cross_entropy", " sum to 2", "bce", "multi_label") if part not in answer.last] == []


def test_several_labels_without_a_separator_are_named(spoiled: Spoiled) -> None:
    several_labels(spoiled)
    del spoiled.recipe["data"]["train"]["label_separator"]
    assert spoiled.refused("train.csv, line 1: the label 'circling;vertical' is no class") == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "timm/test_resnet"}, "Expected 3D (unbatched) or 4D (batched) input to conv2d"),
    ],
)
def test_clips_that_a_model_cannot_take_are_reported(spoiled: Spoiled, model: dict[str, Any], message: str) -> None:
    spoiled.recipe["model"] = model
    answer = spoiled.tell("check")
    assert answer.code == 2
    place, found = answer.last.split(": model: cannot take ")
    assert place.rpartition("/")[2].startswith("recipe.json:")
    assert found.startswith("4 clips of 4 frames of 32×32 pixels: ")
    assert message in answer.last
    assert "another model" in answer.last


def test_crops_larger_than_the_frames_are_named_with_the_file(spoiled: Spoiled) -> None:
    spoiled.recipe["data"]["val"]["transforms"].insert(1, {"name": "multi_crop", "size": 400})
    answer = spoiled.tell("check")
    assert answer.code == 3
    assert f"val.csv, line 1: {video(spoiled, 'val', 1)}: multi_crop takes squares of 400 pixels" in answer.last
    assert "add {name: resize, size: 400} before it" in answer.last


@pytest.mark.parametrize("first", [[], [RESIZE, CLIP]])
def test_a_recipe_has_to_choose_frames_first(spoiled: Spoiled, first: list[Any]) -> None:
    spoiled.recipe["data"]["train"]["transforms"] = [*first, NORMALIZE]
    parts = ["data.train.transforms: a data set of videos needs a first transform", "{name: clip, num_frames: 16"]
    assert spoiled.refused(*parts) == 2
    assert spoiled.tell("data").code == 2
