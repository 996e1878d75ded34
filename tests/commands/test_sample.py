"""`paceline sample`: a data set on disk, all of it or nothing, and a recipe that reads it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from paceline.commands.sample import main
from paceline.core.errors import UsageError
from paceline.core.registry import register
from paceline.data import synthetic
from paceline.data.split_loader import SplitLoader

KINDS = ["classification", "instance_segmentation", "keypoints", "saliency", "segmentation", "video"]


def sample(kind: str, folder: Path, number: int = 8, seed: int = 0) -> int:
    return main(argparse.Namespace(kind=kind, folder=folder, number=number, seed=seed))


def read(part: dict[str, Any]) -> SplitLoader:
    """What a recipe's data.train or data.val stands for."""
    written = [{"name": each} if isinstance(each, str) else dict(each) for each in part.pop("transforms")]
    dataset = _make("dataset", part.pop("dataset"), part)
    transforms = [_make("transform", each.pop("name"), each) for each in written]
    if joints := getattr(dataset, "joints", None):
        transforms = [replace(each, pairs=joints.pairs) if hasattr(each, "pairs") else each for each in transforms]
    return SplitLoader(dataset, transforms, 0)


def _make(kind: str, name: str, arguments: dict[str, Any]) -> Any:
    entry = register.kind(kind).find(name)
    assert entry is not None
    entry.arguments.model_validate(arguments)
    return entry.resolve()(**arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_reads_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder = tmp_path / "a: strange #name" / "set"
    assert sample(kind, folder) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert recipe["task"] == kind
    assert sorted(folder.parent.iterdir()) == [folder]
    sources = {split: read(recipe["data"][split]) for split in ("train", "val")}
    sizes = {split: len(source.dataset) for split, source in sources.items()}
    assert sizes == ({"train": 6, "val": 2} if kind != "keypoints" else {"train": 8, "val": 2})  # people
    for source in sources.values():
        one = source.fetch(0, np.array([0]))
        assert one["image"].shape[0] == 1
        assert ("mask" in one) == (kind in ("saliency", "segmentation"))
        assert ("masks" in one) == (kind == "instance_segmentation")
        assert ("keypoints" in one) == (kind == "keypoints")
    names = {
        "segmentation": synthetic.SHAPES,
        "video": synthetic.MOTIONS,
        "saliency": ["foreground"],
        "keypoints": ["person"],
        "classification": synthetic.SHAPES[1:],
        "instance_segmentation": synthetic.SHAPES[1:],
    }
    assert sources["train"].dataset.classes == sources["val"].dataset.classes == list(names[kind])


def test_an_empty_folder_is_used_and_a_full_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    assert sample("saliency", folder, 2) == 0
    before = sorted(folder.rglob("*"))
    with pytest.raises(UsageError, match="is not empty"):
        sample("saliency", folder)
    assert sorted(folder.rglob("*")) == before
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        sample("saliency", tmp_path / "file")
    with pytest.raises(UsageError, match="cannot be written"):
        sample("saliency", tmp_path / "file" / "below")


def test_nothing_is_left_behind_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic, "_write_lists", full_disk)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        sample("segmentation", tmp_path / "set", 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "seed", "words"), [(1, 0, "--number 1: expected 2"), (4, -1, "--seed -1")])
def test_wrong_numbers_are_reported(tmp_path: Path, number: int, seed: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sample("video", tmp_path / "set", number, seed)
    assert list(tmp_path.iterdir()) == []
