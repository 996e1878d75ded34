"""Contact sheets show what a model is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.batch import Sample
from paceline.data.datasets.memory import MemoryImages
from paceline.data.loading.source import Source
from paceline.data.looking.sheet import CELL, Sheet, augmented
from paceline.data.looking.stages import measure
from paceline.data.transforms.batch_transforms import Flip, Normalize
from paceline.data.transforms.mixing import Mixup
from paceline.data.transforms.sample_transforms import Mirror


def images(number: int = 6) -> MemoryImages:
    pixels = torch.randint(0, 256, (number, 3, 8, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return MemoryImages(pixels, {"label": torch.arange(number) % 2}, ["ant", "bee"])


def test_normalisation_is_undone_exactly() -> None:
    dataset = images()
    source = Source(dataset, [Normalize([0.4, 0.5, 0.6], [0.2, 0.25, 0.3])], 0)
    samples, problem = augmented(source, [4, 1])
    assert problem is None
    assert [index for index, _ in samples] == [4, 1]
    for index, sample in samples:
        np.testing.assert_array_equal(sample["image"], dataset.images[index].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("transform", [Flip(1.0), Mirror(1.0)])
def test_transforms_of_both_kinds_are_seen(transform: Any) -> None:
    dataset = images()
    ((_, sample),), _ = augmented(Source(dataset, [transform], 0), [2])
    np.testing.assert_array_equal(sample["image"], dataset.images[2].permute(1, 2, 0).numpy()[:, ::-1])


def test_mixed_labels_are_written_with_their_shares() -> None:
    source = Source(images(), [Mixup(alpha=1.0, num_classes=2)], 3)
    sheet = Sheet()
    assert sheet.add(source, "train", range(6)) is None
    shares = [caption.split(": ")[1] for _, caption in sheet.shown]
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


def test_what_cannot_be_stacked_is_shown_one_by_one() -> None:
    sheet = Sheet()
    problem = sheet.add(Source(Uneven(), [], 0), "train", [0, 1])
    assert problem is not None
    assert "cannot be stacked" in problem
    assert [caption for _, caption in sheet.shown] == ["train 0: ant", "train 1: ant"]
    picture = sheet.picture("a title")
    assert picture.shape[1] == 2 * (CELL + 16) + 16


def test_one_that_cannot_be_read_is_left_out() -> None:
    sheet = Sheet()
    assert sheet.add(Source(Uneven(), [], 0), "val", [1, 2]) == "broken"
    assert len(sheet.shown) == 1


def test_stages_add_up_and_name_the_largest() -> None:
    from time import sleep

    class Slow(Uneven):
        def path(self, index: int) -> Path:
            return Path(f"nowhere/{index}.jpg")

        def read(self, index: int) -> Sample:
            sleep(0.01)
            return super().read(index)

    stages = measure(Source(Slow(), [Mirror()], 0), [0, 1], 2)
    assert stages.bound == "decode"
    assert stages.decode >= 0.01
    assert stages.read == stages.bytes == 0
    assert stages.samples == 2
    assert measure(Source(images(), [], 0), range(6), 2).bound == "memory"
