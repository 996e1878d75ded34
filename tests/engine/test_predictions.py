"""Predictions as files: names like those of the images, numbers as they are, never half-written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import NamedFiles

from paceline.core.errors import UsageError
from paceline.data.batch import Batch, Sample
from paceline.data.io.mask import decode_gray, decode_ids
from paceline.engine.predictions import Map, MapFolder, file_names
from paceline.visualize.colors import Color, class_color


class Maps:
    """A task that predicts what it is given."""

    def __init__(self, palette: Sequence[Color] | None = None) -> None:
        self.palette = palette

    def maps(self, predictions: list[Map]) -> list[Map]:
        return predictions


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
    gray = MapFolder(tmp_path / "gray", dataset, Maps())
    colored = MapFolder(tmp_path / "ids", dataset, Maps([class_color(number) for number in range(256)]))
    for folder in (gray, colored, gray):  # a second time, they are replaced
        folder.save(ids, found)
    assert sorted(path.name for path in (tmp_path / "gray").iterdir()) == ["a.png", "c.png"]
    assert decode_gray(tmp_path / "gray/c.png").tolist() == found[0].tolist()
    assert decode_ids(tmp_path / "ids/a.png").tolist() == found[1].tolist()


def test_what_cannot_be_saved_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = MapFolder(tmp_path / "file", NamedFiles("a.jpg"), Maps())
    with pytest.raises(UsageError, match=r"file/a\.png: the prediction cannot be written"):
        folder.save(Batch(id=torch.tensor([0])), [np.zeros((2, 2), np.uint8)])


def test_a_folder_holds_the_predictions_of_one_evaluation(tmp_path: Path) -> None:
    place, plain = tmp_path / "run" / "val", np.zeros((2, 2), np.uint8)

    def evaluate(*names: str, left_out: Sequence[int] = ()) -> list[str]:
        folder = MapFolder(place, NamedFiles(*names), Maps())
        read = [index for index in range(len(names)) if index not in left_out]
        folder.save(Batch(id=torch.tensor(read)), [plain] * len(read))
        folder.finish([], left_out)
        return sorted(str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir())

    assert evaluate("x/a.jpg", "x/in/b.jpg", "y/a.jpg") == ["x/a.png", "x/in/b.png", "y/a.png"]
    (place / "x" / ("." + "0" * 16 + ".partial")).touch()
    (place / "y" / "notes.txt").touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "own.png").touch()
    (tmp_path / "run" / "own.png").touch()
    (place / "linked").symlink_to(outside)
    (place / "gone.png").symlink_to(outside / "own.png")
    assert evaluate("x/a.jpg", "z/c.jpg") == ["x/a.png", "y/notes.txt", "z/c.png"]
    assert (place / "linked").is_symlink()
    assert not (place / "x" / "in").exists()
    assert evaluate("x/a.jpg", "z/c.jpg", left_out=[0]) == ["y/notes.txt", "z/c.png"]
    assert (outside / "own.png").is_file()
    assert (tmp_path / "run" / "own.png").is_file()
    place = tmp_path / "run" / "test"
    place.symlink_to(outside)
    assert evaluate("a.jpg") == ["a.png", "own.png"], "a link may lead to what others use"
