"""Data sets that are drawn: files as real ones, the same from the same seed, and shapes where the masks say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.datasets.image_mask import ImageMask
from paceline.data.datasets.video import VideoFolder, VideoList
from paceline.data.split_loader import SplitLoader
from paceline.data.synthetic import (
    IGNORED,
    MOTIONS,
    SHAPES,
    Shape,
    write_classification,
    write_saliency,
    write_segmentation,
    write_video,
)
from paceline.data.transforms.video import MultiClip

WRITERS = [write_saliency, write_segmentation, write_video]


def written(folder: Path, write: Callable[[Path, int, int], None], number: int = 8, seed: int = 0) -> Path:
    folder.mkdir()
    write(folder, number, seed)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("write", WRITERS)
def test_the_seed_tells_every_byte(tmp_path: Path, write: Callable[[Path, int, int], None]) -> None:
    first, again = (contents(written(tmp_path / name, write, 4, 3)) for name in ("first", "again"))
    other = contents(written(tmp_path / "other", write, 4, 4))
    longer = contents(written(tmp_path / "longer", write, 5, 3))
    assert first == again
    lists = {name for name in first if name.startswith(("train.", "val."))}
    assert len(lists) == 2
    assert all(other[name] != first[name] for name in first.keys() - lists)
    assert all(longer[name] == first[name] for name in first.keys() - lists)


def test_classification_has_a_folder_per_class_and_a_hue_for_each(tmp_path: Path) -> None:
    root = written(tmp_path / "set", write_classification, 12)
    dataset = ImageFolder(root)
    assert dataset.classes == ["disc", "square", "triangle"]
    samples = [dataset.read(index) for index in range(len(dataset))]
    assert [sample["label"] for sample in samples] == [0] * 4 + [1] * 4 + [2] * 4
    assert {sample["image"].shape for sample in samples} == {(64, 64, 3)}
    # The vivid shape lies on a gray ground: its class has most of one primary color, within half a turn of a third.
    hues = []
    for sample in samples:
        pixels = sample["image"].reshape(-1, 3).astype(np.float64)
        vivid = pixels[np.argsort(np.ptp(pixels, axis=1))[-200:]].mean(0)
        hues.append(np.angle(vivid @ np.exp(2j * np.pi / 3 * np.arange(3))) / (2 * np.pi / 3))
    expected = np.repeat([1.0, 2.0, 3.0], 4)
    assert (np.abs((np.array(hues) + expected + 1.5) % 3 - 1.5) < 0.5).all()
    again = written(tmp_path / "again", write_classification, 12)
    other = written(tmp_path / "other", write_classification, 12, seed=1)
    assert contents(root) == contents(again)
    assert contents(root).keys() == contents(other).keys()
    assert contents(root) != contents(other)


def test_saliency_has_grey_masks_of_vivid_shapes(tmp_path: Path) -> None:
    root = written(tmp_path / "set", write_saliency, 12)
    parts = [ImageMask(root, list_file=name, binary=True) for name in ("train.txt", "val.txt")]
    assert [len(part) for part in parts] == [9, 3]
    sizes = set()
    for index in range(9):
        sample = parts[0].read(index)
        inside = sample["mask"] == 255
        assert set(np.unique(sample["mask"])) == {0, 255}
        assert 0.02 < inside.mean() < 0.6
        colors = sample["image"].astype(np.float64)
        sizes.add(inside.shape)
        edges = np.abs(np.diff(colors.mean(2), axis=1)).mean()
        assert edges > 1  # it has a texture
    assert len(sizes) > 1
    assert {parts[0].path(index) for index in range(9)}.isdisjoint(parts[1].path(index) for index in range(3))


def test_segmentation_has_masks_of_classes_and_borders(tmp_path: Path) -> None:
    root = written(tmp_path / "set", write_segmentation, 12)
    dataset = ImageMask(root, classes=SHAPES, ignore_index=IGNORED)
    masks = [dataset.read(index)["mask"] for index in range(len(dataset))]
    assert set(np.unique(masks)) == {0, 1, 2, 3, IGNORED}
    assert 0.01 < np.mean(np.array(masks) == IGNORED) < 0.15
    assert Image.open(root / "masks/image_0000.png").mode == "P"
    batch = SplitLoader(dataset, [], 0).fetch(0, np.arange(4))
    assert batch["image"].shape == (4, 3, 96, 128)


def test_videos_are_read_by_list_and_by_folder(tmp_path: Path) -> None:
    root = written(tmp_path / "set", write_video, 8)
    splits = [VideoList(root / name, classes=MOTIONS) for name in ("train.csv", "val.csv")]
    assert [len(part) for part in splits] == [6, 2]
    folder = VideoFolder(root / "videos")
    assert (len(folder), folder.classes) == (8, list(MOTIONS))
    for part in splits:
        for index in range(len(part)):
            assert part.path(index).parent.name == MOTIONS[part.open(index)["label"]]
    batch = SplitLoader(splits[0], [MultiClip(num_clips=2, num_frames=4, stride=2)], 0).fetch(0, np.arange(4))
    assert batch["image"].shape == (4, 2, 3, 4, 80, 112)
    assert batch["label"].tolist() == [0, 1, 2, 3]


def test_motions_move_as_they_are_called(tmp_path: Path) -> None:
    """Where frames change tells the motion: along rows, along columns, or around."""
    root = written(tmp_path / "set", write_video, 4)
    dataset = VideoList(root / "train.csv", classes=MOTIONS)
    spread = {}
    for index in range(3):
        sample = MultiClip(num_clips=1, num_frames=24)(dataset.open(index), np.empty(0))
        frames = sample["image"][0].astype(np.float64).mean(-1)
        moving = frames.std(0) > 12
        rows, columns = np.nonzero(moving)
        spread[MOTIONS[sample["label"]]] = (np.ptp(rows), np.ptp(columns))
    assert spread["sideways"][1] > 2 * spread["sideways"][0]
    assert min(spread["circling"]) > 40


@pytest.mark.parametrize(("sides", "area"), [(0, np.pi), (4, 2.0), (3, 3 * np.sqrt(3) / 4)])
def test_shapes_have_the_area_of_their_kind(sides: int, area: float) -> None:
    inside = Shape(sides, 50.0, 50.0, 40.0, 0.3).distance(100, 100) < 0
    assert inside.sum() == pytest.approx(area * 40**2, rel=0.01)
