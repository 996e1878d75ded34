"""Contact sheets show what a model is given, with all that is known of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.batch import KeypointNames, Sample
from paceline.data.datasets.idx import MemoryImages
from paceline.data.inspect import CELL, ContactSheet, draw_sample, load_augmented
from paceline.data.loader_profile import loading_speed
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.base import OnSamples
from paceline.data.transforms.batch import MixUp, Normalize
from paceline.data.transforms.geometric import RandomHorizontalFlip
from paceline.visualize.colors import LEFT, class_color


def images(number: int = 6) -> MemoryImages:
    pixels = torch.randint(0, 256, (number, 3, 8, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return MemoryImages(pixels, {"label": torch.arange(number) % 2}, ["ant", "bee"])


def test_normalisation_is_undone_exactly() -> None:
    dataset = images()
    source = SplitLoader(dataset, [Normalize([0.4, 0.5, 0.6], [0.2, 0.25, 0.3])], 0)
    samples, problem = load_augmented(source, [4, 1])
    assert problem is None
    assert [index for index, _ in samples] == [4, 1]
    for index, sample in samples:
        np.testing.assert_array_equal(sample["image"], dataset.images[index].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("transform", [RandomHorizontalFlip(1.0), OnSamples(RandomHorizontalFlip(1.0))])
def test_transforms_of_both_kinds_are_seen(transform: Any) -> None:
    dataset = images()
    ((_, sample),), _ = load_augmented(SplitLoader(dataset, [transform], 0), [2])
    np.testing.assert_array_equal(sample["image"], dataset.images[2].permute(1, 2, 0).numpy()[:, ::-1])


def test_mixed_labels_are_written_with_their_shares() -> None:
    source = SplitLoader(images(), [MixUp(alpha=1.0, num_classes=2)], 3)
    sheet = ContactSheet()
    assert sheet.add(source, "train", range(6)) is None
    shares = [caption.split(": ")[1] for _, caption, *_ in sheet.panels]
    assert any("," in each and "ant 0." in each and "bee 0." in each for each in shares)


class Uneven:
    """Two images of different sizes, and one that cannot be read."""

    classes = ["ant"]
    channels = 3

    def __len__(self) -> int:
        return 3

    def read(self, index: int) -> Sample:
        if index == 2:
            raise ValueError("broken")
        return {"image": np.full((4 + index, 8, 3), 50, np.uint8), "label": 0}


def test_what_cannot_be_stacked_is_drawn_one_by_one() -> None:
    sheet = ContactSheet()
    problem = sheet.add(SplitLoader(Uneven(), [], 0), "train", [0, 1])
    assert problem is not None
    assert "cannot be stacked" in problem
    assert [caption for _, caption, *_ in sheet.panels] == ["train 0: ant", "train 1: ant"]
    assert sheet.draw("a title").shape[1] == 2 * (CELL + 16) + 16


def test_one_that_cannot_be_read_is_left_out() -> None:
    sheet = ContactSheet()
    problem = sheet.add(SplitLoader(Uneven(), [], 0), "val", [1, 2])
    assert problem is not None
    assert "ValueError: broken" in problem
    assert len(sheet.panels) == 1


GRAY = np.full((20, 30, 3), 100, np.uint8)
SQUARE = np.zeros((20, 30), np.uint8)
SQUARE[5:15, 10:20] = 1
ANNOTATED: dict[str, tuple[Sample, list[str], list[str]]] = {
    "boxes": ({"boxes": np.array([[3, 4, 10, 9]]), "classes": np.array([1])}, ["cat", "dog"], ["dog"]),
    "boxes of no class": ({"boxes": np.array([[3, 4, 10, 9]])}, ["cat"], []),
    "crowd": (
        {"boxes": np.array([[3, 4, 10, 9]]), "classes": np.array([0]), "crowd": np.array([True])}, ["cat"], ["cat"],
    ),
    "label map": ({"mask": SQUARE}, ["cat", "dog"], ["cat", "dog"]),
    "ignored pixels": ({"mask": 255 - SQUARE}, ["cat", "dog"], ["ignored"]),
    "shades": ({"mask": SQUARE * 255}, ["thing"], ["thing"]),
    "shades without a name": ({"mask": SQUARE * 255}, [], []),
    "masks of objects": ({"masks": SQUARE[None], "classes": np.array([2])}, ["cat", "dog", "hat"], ["hat"]),
    "keypoints": (
        {"keypoints": np.array([[[5, 5, 2], [25, 5, 1]]]), "classes": np.array([0])},
        ["person"],
        ["person", "left", "right", "neither"],
    ),
}  # fmt: skip


class Annotated:
    """One gray image."""

    channels = 3
    joints = KeypointNames(["left_hand", "right_hand"], [(0, 1)], [(0, 1)])

    def __init__(self, annotations: Sample, classes: list[str]) -> None:
        self.annotations, self.classes = annotations, classes

    def __len__(self) -> int:
        return 1

    def read(self, index: int) -> Sample:
        return {"image": GRAY, **self.annotations}


@pytest.mark.parametrize("kind", ANNOTATED)
def test_annotations_are_drawn_and_named(kind: str) -> None:
    annotations, classes, names = ANNOTATED[kind]
    sheet = ContactSheet()
    assert sheet.add(SplitLoader(Annotated(annotations, classes), [], 0), "train", [0]) is None
    (panel,) = sheet.panels
    assert panel.image.shape == (160, 240, 3)
    assert (panel.image != 100).any() == (kind != "ignored pixels")
    assert [entry.name for entry in panel.legend] == names
    assert sheet.draw("title").shape[1] == CELL + 32


def test_annotations_grow_with_the_image() -> None:
    sample: Sample = {"image": GRAY, "boxes": np.array([[3, 4, 10, 9]]), "classes": np.array([1])}
    rows, columns = np.nonzero((draw_sample(sample, 60, ["cat", "dog"]) == class_color(1)).all(2))
    assert (columns.min(), rows.min(), columns.max(), rows.max()) == (6, 8, 19, 17)
    sample = {"image": GRAY, "keypoints": np.array([[[5, 5, 2], [25, 5, 1]]])}
    assert tuple(draw_sample(sample, 120, ["person"], Annotated.joints)[20, 20]) == LEFT


def test_clips_show_some_of_their_frames() -> None:
    frames = np.stack([np.full((6, 8, 3), 10 * index, np.uint8) for index in range(8)])
    tiles = draw_sample({"image": frames}, 66, ["cat"])
    assert tiles.shape == (50, 66, 3)
    np.testing.assert_array_equal(draw_sample({"image": frames.reshape(2, 4, 6, 8, 3)}, 66, ["cat"]), tiles)


def test_speed_is_that_of_all_threads() -> None:
    from time import sleep

    class Slow(Uneven):
        def path(self, index: int) -> Path:
            return Path(f"nowhere/{index}.jpg")

        def read(self, index: int) -> Sample:
            sleep(0.01)
            return super().read(index)

    speeds = [loading_speed(SplitLoader(Slow(), [RandomHorizontalFlip()], 0), [0, 1], threads) for threads in (1, 2)]
    assert 10 < speeds[0] < 100 < 2 * speeds[1] < 400
    assert loading_speed(SplitLoader(images(), [], 0), range(6), 2) > 400
