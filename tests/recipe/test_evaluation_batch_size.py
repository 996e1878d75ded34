"""Batch sizes that follow the data: `evaluate.batch_size: auto`, and steps larger than the data set."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from paceline.core.errors import DataError
from paceline.core.world import World
from paceline.data.batch import Sample
from paceline.data.datasets.idx import MemoryImages
from paceline.data.loader import automatic_batch_size
from paceline.data.skip_list import SkipList
from paceline.data.split_loader import SplitLoader
from paceline.recipe.build_context import BuildContext
from paceline.recipe.build_data import make_sampler
from paceline.recipe.load import load
from paceline.recipe.validate import validate


def loader(*shape: int) -> SplitLoader:
    return SplitLoader(MemoryImages(torch.zeros(1, *shape, dtype=torch.uint8), {}, []), [], 0)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 28, 28), 256),
        ((3, 64, 64), 256),  # 341 fit
        ((3, 112, 112), 64),  # 111
        ((3, 224, 224), 16),  # 27
        ((3, 320, 320), 8),  # 13
        ((3, 16, 112, 112), 4),  # 6 clips
        ((3, 2000, 2000), 1),
    ],
)
def test_a_batch_holds_about_four_million_values(shape: tuple[int, ...], expected: int) -> None:
    assert automatic_batch_size(loader(*shape), is_cpu=True) == expected
    assert automatic_batch_size(loader(*shape), is_cpu=False) == 256


class Damaged(MemoryImages):
    """Images the first of which cannot be read."""

    def gather(self, ids: torch.Tensor) -> dict[str, Any]:
        if 0 in ids:
            raise DataError("images/0.png is damaged")
        return super().gather(ids)

    def read(self, index: int) -> Sample:
        if index == 0:
            raise DataError("images/0.png is damaged")
        return super().read(index)


def test_a_sample_that_cannot_be_read_is_named() -> None:
    images = Damaged(torch.zeros(2, 3, 224, 224, dtype=torch.uint8), {}, [])
    with pytest.raises(DataError, match=r"images/0\.png"):
        automatic_batch_size(SplitLoader(images, [], 0), is_cpu=True)


def test_a_sample_that_may_be_skipped_does_not_decide() -> None:
    images = Damaged(torch.zeros(2, 3, 224, 224, dtype=torch.uint8), {}, [])
    assert automatic_batch_size(SplitLoader(images, [], 0, SkipList("val", 1)), is_cpu=True) == 16


def test_a_batch_larger_than_the_data_set_gets_a_note_with_its_place() -> None:
    context = BuildContext(validate(load("quickstart", ["data.batch_size=101"])), World(0, 1, 0, torch.device("cpu")))
    assert make_sampler(context, 101).steps_per_epoch == 1
    assert context.notes == []
    assert make_sampler(context, 100).steps_per_epoch == 1
    (note,) = context.notes
    assert re.match(r"command line: data\.batch_size: 101 .*\b100\b", note)
