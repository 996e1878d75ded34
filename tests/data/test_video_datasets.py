"""Videos in folders and lists, read as samples and batches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.registered import arguments_of
from video_files import HEIGHT, WIDTH, decode_all, write_video

from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.data.datasets.video import VideoFolder, VideoList
from paceline.data.io.video import EncodedVideo
from paceline.data.loader import Request, load
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.video import Clip, MultiClip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of 12 frames."""
    return write_video(tmp_path_factory.mktemp("made") / "video.mp4", num_frames=12)


@pytest.fixture
def root(tmp_path: Path, made: Path) -> Path:
    """Two classes in folders, and lists of them."""
    names = ["run/a.mp4", "run/deep/b.MP4", "sit/c.mp4", "sit/d.mp4"]
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(made, tmp_path / "data" / name)
    (tmp_path / "data/folds.txt").write_text(
        "".join(f"{name} {k // 2} source{k} {k % 3}\n" for k, name in enumerate(names))
    )
    (tmp_path / "data/list.csv").write_text("path,label\n" + "".join(f"{name},{name[:3]}\n" for name in names))
    (tmp_path / "data/several.csv").write_text("run/a.mp4,fast|loud\nsit/c.mp4,\nsit/d.mp4,slow\n")
    return tmp_path / "data"


def test_folder(root: Path) -> None:
    (root / "sit/notes.txt").write_text("no video")
    data = VideoFolder(root)
    assert data.classes == ["run", "sit"]
    assert [data.path(k).relative_to(root).as_posix() for k in range(len(data))] == [
        "run/a.mp4",
        "run/deep/b.MP4",
        "sit/c.mp4",
        "sit/d.mp4",
    ]
    sample = data.read(2)
    assert isinstance(sample["image"], EncodedVideo)
    assert (sample["image"].num_frames, sample["label"]) == (12, 1)


def test_files_that_are_no_videos_are_counted(root: Path) -> None:
    assert VideoFolder(root).notes == []
    for name in ("run/x.gif", "run/deep/y.WMV", "sit/z.wmv", "sit/README", "sit/a.txt", "sit/Thumbs.db", "sit/.hidden"):
        (root / name).touch()
    data = VideoFolder(root)
    (note,) = data.notes
    assert note.startswith("4 files are skipped: .wmv 2, .gif 1, no extension 1; videos are .mp4, .m4v, ")
    assert len(data) == 4


def test_folder_of_a_split_or_a_share(root: Path) -> None:
    assert len(VideoFolder(root.parent, split="data")) == 4
    shares = {"train": 0.75, "val": 0.25}
    parts = [VideoFolder(root, split=split, split_shares=shares) for split in shares]
    names = [part.path(k) for part in parts for k in range(len(part))]
    assert [len(part) for part in parts] == [3, 1]
    assert len(set(names)) == 4


def test_folders_that_are_not_as_expected(root: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        VideoFolder(root / "nowhere")
    with pytest.raises(DataError, match="has run, sit"):
        VideoFolder(root, split="train")
    (root / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no videos .* \.mp4"):
        VideoFolder(root)
    with pytest.raises(DataError, match="no class folders"):
        VideoFolder(root / "empty")


def test_list_with_a_header(root: Path) -> None:
    data = VideoList(root / "list.csv", video="path")
    assert (len(data), data.classes) == (4, ["run", "sit"])
    assert [data.read(k)["label"] for k in range(4)] == [0, 0, 1, 1]


def test_folds(root: Path) -> None:
    held_out = VideoList(Path("folds.txt"), root=root, fold=0, split="test", classes=["running", "sitting"])
    rest = VideoList(Path("folds.txt"), root=root, fold=0, split="train", classes=["running", "sitting"])
    assert [held_out.path(k).name for k in range(len(held_out))] == ["a.mp4", "d.mp4"]
    assert [rest.path(k).name for k in range(len(rest))] == ["b.MP4", "c.mp4"]
    assert [rest.open(k)["label"] for k in range(2)] == [0, 1]
    assert rest.classes == ["running", "sitting"]
    with pytest.raises(DataError, match=r"no line is in fold 7; the folds are 0, 1, 2"):
        VideoList(root / "folds.txt", fold=7, split="train")
    (root / "one.txt").write_text("run/a.mp4 0 source 0\n")
    with pytest.raises(DataError, match="none are left to train on"):
        VideoList(root / "one.txt", fold=0, split="train")
    with pytest.raises(DataError, match=r"line 1: 4 columns, expected at least 6"):
        VideoList(root / "folds.txt", fold=0, fold_column=5, split="train")


def test_several_labels(root: Path) -> None:
    data = VideoList(root / "several.csv", label_separator="|")
    assert data.classes == ["fast", "loud", "slow"]
    assert [data.read(k)["label"].tolist() for k in range(3)] == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_files_that_are_missing_or_outside_are_named_with_their_line(root: Path, made: Path) -> None:
    (root / "bad.txt").write_text("run/a.mp4 0\nrun/gone.mp4 0\n../outside.mp4 1\n")
    shutil.copy(made, root.parent / "outside.mp4")
    data = VideoList(root / "bad.txt")
    with pytest.raises(DataError, match=r"bad\.txt, line 2: .*gone\.mp4: no such file"):
        data.open(1)
    with pytest.raises(DataError, match=r"bad\.txt, line 3: .*follow_links"):
        data.open(2)
    assert VideoList(root / "bad.txt", follow_links=True).open(2)["image"].num_frames == 12


def test_batches_of_clips_and_of_views(root: Path, made: Path) -> None:
    expected = torch.from_numpy(decode_all(made))
    clips = SplitLoader(VideoFolder(root), [Clip(4, 2)], seed=0).fetch(0, np.arange(3))
    assert clips["image"].shape == (3, 3, 4, HEIGHT, WIDTH)
    assert clips["label"].tolist() == [0, 0, 1]
    views = SplitLoader(VideoFolder(root), [MultiClip(2, 4, 2)], seed=0).fetch(0, np.arange(3))
    assert views["image"].shape == (3, 2, 3, 4, HEIGHT, WIDTH), "[N, V, C, T, H, W]"
    torch.testing.assert_close(views["image"][1, 1], expected[[5, 7, 9, 11]].permute(3, 0, 1, 2))


def test_a_clip_depends_on_seed_epoch_and_sample_alone(root: Path) -> None:
    source = SplitLoader(VideoFolder(root), [Clip(3, 1, (1.0, 2.0))], seed=3)
    together = source.fetch(1, np.arange(4))["image"]
    alone = SplitLoader(VideoFolder(root), [Clip(3, 1, (1.0, 2.0))], seed=3).fetch(1, np.array([2]))["image"]
    assert torch.equal(together[2:3], alone)
    (by_worker,) = load(source, [Request(1, np.arange(4))], 1)
    assert torch.equal(by_worker["image"], together)
    assert not torch.equal(source.fetch(2, np.arange(4))["image"], together)


def test_without_a_clip_it_is_refused(root: Path) -> None:
    with pytest.raises((DataError, ValueError), match="name: clip"):
        SplitLoader(VideoFolder(root), [], seed=0).fetch(0, np.arange(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fold": 1}, "fold needs split"),
        ({"fold": 1, "split": "train", "split_shares": {"train": 0.5, "val": 0.5}}, "either fold or split_shares"),
        ({"split": "train"}, "split needs split_column or fold or split_shares"),
        ({"split": "train", "split_column": 2, "fold": 1}, "either split_column or fold"),
        ({"split_column": 2}, "split_column needs split"),
        ({"split": "test", "split_shares": {"train": 0.5, "val": 0.5}}, "one of split_shares"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        arguments_of("dataset", "video_list")(file="list.txt", **arguments)


def test_a_folder_that_is_a_class_leaves_no_column_to_name() -> None:
    with pytest.raises(ArgumentError, match="label: label_from: folder takes no column"):
        VideoList(Path("list.txt"), label_from="folder", label=1)


def test_names_of_recipes_stand_for_what_takes_their_arguments(root: Path) -> None:
    folder = register.kind("dataset").find("video_folder")
    definition = register.kind("dataset").find("video_list")
    assert folder is not None
    assert definition is not None
    assert len(folder.resolve()(**arguments_of("dataset", "video_folder")(root=str(root)).model_dump())) == 4
    arguments = arguments_of("dataset", "video_list")(file="folds.txt", root=str(root), fold=1, split="val")
    assert len(definition.resolve()(**arguments.model_dump())) == 1


@pytest.mark.real_data
def test_real_videos(real_data: Path) -> None:
    root = real_data / "surv_fight_128"
    if not root.is_dir():
        pytest.skip(f"no {root}")
    assert (len(VideoFolder(root)), VideoFolder(root).classes) == (300, ["fight", "noFight"])
    assert [len(VideoList(root / name)) for name in ("train.txt", "test.txt")] == [217, 83]
    folds = [VideoList(root / "folds.txt", fold=fold, split="test") for fold in range(5)]
    assert sum(map(len, folds)) == 300
    data = VideoFolder(root)
    rng = np.random.default_rng(0)
    for index in range(0, 300, 15):
        expected = decode_all(data.path(index))
        numbers = rng.integers(0, len(expected), 8)
        video = data.open(index)["image"]
        assert video.num_frames == len(expected)
        np.testing.assert_array_equal(video.frames(numbers), expected[numbers])
    frames = [data.open(index)["image"].num_frames for index in range(300)]
    assert (min(frames), max(frames)) == (20, 142)
