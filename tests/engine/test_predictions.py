"""Predictions as files: names like those of the images, numbers as they are, never half-written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import NamedFiles

from paceline.core.errors import UsageError
from paceline.data.batch import Batch, Sample
from paceline.data.io.mask import decode_gray, decode_ids
from paceline.engine.predictions import MapFolder, file_names
from paceline.visualize.colors import class_color


def test_files_are_named_like_images() -> None:
    assert file_names(NamedFiles("a.jpg", "b.v2.png")) == ["a.png", "b.v2.png"]
    assert file_names(NamedFiles("x/a.jpg", "y/a.jpg")) == ["x/a.png", "y/a.png"]
    assert file_names(NamedFiles("x/a.jpg", "x/b.jpg")) == ["a.png", "b.png"]
    assert file_names(NamedFiles("a.jpg", "a.png")) == ["a.jpg.png", "a.png.png"]
    assert file_names(NamedFiles("a.jpg", "a.jpg")) == ["a-00000000.png", "a-00000001.png"]


def test_without_files_they_are_numbered() -> None:
    class Memory:
        classes = ["a"]
        channels = 3

        def __len__(self) -> int:
            return 2

        def read(self, index: int) -> Sample:
            raise AssertionError("names are known without reading a sample")

    assert file_names(Memory()) == ["00000000.png", "00000001.png"]


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    found = [random.integers(0, 256, size).astype(np.uint8) for size in ((5, 7), (9, 4))]
    dataset, ids = NamedFiles("a.jpg", "b.jpg", "c.jpg"), Batch(id=torch.tensor([2, 0]))
    gray = MapFolder(tmp_path / "gray", dataset, list)
    colored = MapFolder(tmp_path / "ids", dataset, list, [class_color(number) for number in range(256)])
    for folder in (gray, colored, gray):  # a second time, they are replaced
        folder.save(ids, found)
    assert sorted(path.name for path in (tmp_path / "gray").iterdir()) == ["a.png", "c.png"]
    assert decode_gray(tmp_path / "gray/c.png").tolist() == found[0].tolist()
    assert decode_ids(tmp_path / "ids/a.png").tolist() == found[1].tolist()


def test_what_cannot_be_saved_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = MapFolder(tmp_path / "file", NamedFiles("a.jpg"), list)
    with pytest.raises(UsageError, match=r"file/a\.png: the prediction cannot be written"):
        folder.save(Batch(id=torch.tensor([0])), [np.zeros((2, 2), np.uint8)])
