"""Mean and std as the model gets them, by a formula, and what is warned about."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.data.datasets.idx import MemoryImages
from paceline.data.loader_profile import InputStats, input_stats, input_warnings
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import Normalize

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (20, 3, 5, 7), dtype=np.uint8))
IMAGES = MemoryImages(PIXELS, {"label": torch.zeros(20, dtype=torch.int64)}, ["a"])


def test_statistics_are_those_of_all_pixels() -> None:
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.1]
    found = input_stats(SplitLoader(IMAGES, [Normalize(mean, std)], 0), range(20))
    assert found is not None
    values = (PIXELS.numpy() / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(found.mean, values.mean((0, 2, 3)), atol=1e-6)
    np.testing.assert_allclose(found.std, values.std((0, 2, 3)), atol=1e-6)
    assert found.is_normalized
    plain = input_stats(SplitLoader(IMAGES, [], 0), range(20))
    assert plain is not None
    assert not plain.is_normalized
    np.testing.assert_allclose(plain.mean, PIXELS.numpy().mean((0, 2, 3)) / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"train": InputStats([0.1], [1.1], True), "val": InputStats([0.0], [1.0], True)}, []),
        ({"train": InputStats([0.45], [0.25], False)}, ["data.train: images are not normalized", "mean: [0.45]"]),
        (  # one warning for all splits, with the numbers of train
            {"train": InputStats([0.45], [0.25], False), "val": InputStats([0.47], [0.26], False)},
            ["data.train, data.val: images are not normalized", "mean: [0.45], std: [0.25]"],
        ),
        ({"train": InputStats([113.0], [60.0], True)}, ["data.train: images have mean [113.00]"]),
        ({"train": InputStats([0.0], [0.004], True)}, ["data.train: images have"]),
    ],
)
def test_what_is_suspicious(splits: dict[str, InputStats], words: list[str]) -> None:
    found = input_warnings(splits)
    assert bool(found) == bool(words)
    for word in words:
        assert word in " ".join(found)
