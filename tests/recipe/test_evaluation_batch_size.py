"""`evaluate.batch_size: auto`: what is evaluated at once follows the size of a sample."""

from __future__ import annotations

import pytest
import torch

from paceline.data.batch import Sample
from paceline.data.datasets.idx import MemoryImages
from paceline.data.split_loader import SplitLoader
from paceline.recipe.build_data import automatic_batch_size


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


class Unreadable(MemoryImages):
    def gather(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        raise OSError("damaged")

    def read(self, index: int) -> Sample:
        raise OSError("damaged")


def test_a_sample_that_cannot_be_read_is_left_to_the_evaluation() -> None:
    damaged = SplitLoader(Unreadable(torch.zeros(1, 3, 224, 224, dtype=torch.uint8), {}, []), [], 0)
    assert automatic_batch_size(damaged, is_cpu=True) == 256
