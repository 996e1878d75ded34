"""The order contract for single samples: what is random about a sample depends on (seed, epoch, sample) alone."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from paceline.core.errors import DataError
from paceline.data.batch import Batch, Sample, collate
from paceline.data.datasets.idx import MemoryImages
from paceline.data.rng import uniforms
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.base import BatchTransform
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.geometric import RandomCrop, RandomHorizontalFlip

CPU = torch.device("cpu")


@dataclass
class ImagesWritten:
    """A data set whose images tell their number; sizes may differ."""

    size: int = 20
    odd: int | None = None
    classes: list[str] = field(default_factory=lambda: ["even", "odd"])
    channels: int = 1

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> Sample:
        width = 7 if index == self.odd else 6
        return {"image": np.full((5, width, 1), index, np.uint8), "label": index % 2, "weight": np.array([index, 0.5])}


@dataclass(frozen=True)
class AddDraw:
    """Adds a whole random number to a sample, so that what it drew can be read off."""

    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: npt.NDArray[np.float64]) -> Sample:
        return {**sample, "image": sample["image"] + np.uint8(draws[1] * 200)}


@dataclass(frozen=True)
class WriteDraws:
    """Replaces the images by the numbers that were drawn for them, the last two of each row."""

    draws: ClassVar[int] = 2
    is_batch: ClassVar[bool] = True

    def __call__(self, batch: dict[str, Any], draws: Tensor) -> dict[str, Any]:
        return {**batch, "image": torch.cat([batch["image"].flatten(1).double()[:, -2:], draws], 1)}


def ids(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, np.int64)


def memory(size: int = 30) -> MemoryImages:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (size, 3, 8, 6), dtype=torch.uint8, generator=generator)
    fields = {"label": torch.arange(size) % 4, "box": torch.arange(size * 4.0).view(size, 4)}
    return MemoryImages(images, fields, ["a", "b", "c", "d"])


def as_lists(batch: Batch) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items()}


def test_samples_are_stacked_by_field() -> None:
    batch = SplitLoader(ImagesWritten(), [], seed=0).fetch(0, ids(7, 2))
    assert batch.ids.tolist() == [7, 2]
    assert (batch["image"].shape, batch["image"].dtype) == ((2, 1, 5, 6), torch.uint8)
    assert batch["image"].is_contiguous()
    assert batch["image"][:, 0, 0, 0].tolist() == [7, 2]
    assert (batch["label"].tolist(), batch["label"].dtype) == ([1, 0], torch.int64)
    assert batch["weight"].tolist() == [[7, 0.5], [2, 0.5]]
    assert batch.size == 2


def test_channels_move_to_the_front_and_keep_their_order() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)  # [H, W, C]
    batch = collate(ids(0), [{"image": image}])
    assert all(batch["image"][0, c, y, x] == image[y, x, c] for c in range(3) for y in range(2) for x in range(4))


def test_images_of_different_sizes_are_refused_naming_the_samples() -> None:
    with pytest.raises(DataError, match=r"samples 3 and 8 differ in size \(6×5 and 7×5\).*resize"):
        SplitLoader(ImagesWritten(odd=8), [], seed=0).fetch(0, ids(3, 4, 8))


@pytest.mark.parametrize("dataset", [ImagesWritten(), memory()], ids=["read", "in memory"])
def test_a_sample_that_a_loss_refuses_is_named_where_it_is_loaded(dataset: Any) -> None:
    loader = SplitLoader(dataset, [], seed=0)
    loader.checks = [lambda batch: (7, "no label") if 7 in batch.ids else None]
    assert loader.fetch(0, ids(1, 2)).size == 2
    with pytest.raises(DataError, match=rf"{type(dataset).__name__}: sample 7: no label"):
        loader.fetch(0, ids(2, 7))


def test_memory_gives_what_reading_one_by_one_gives() -> None:
    source = SplitLoader(memory(), [], seed=0)
    assert source.in_memory
    together = source.fetch(0, ids(4, 29, 0))
    single = collate(ids(4, 29, 0), [source.dataset.read(index) for index in (4, 29, 0)])
    assert as_lists(together) == as_lists(single)


def test_a_transform_of_single_samples_takes_the_way_through_python() -> None:
    assert not SplitLoader(memory(), [AddDraw()], seed=0).in_memory


@pytest.mark.parametrize("epoch", [0, 5])
def test_what_a_sample_draws_depends_on_seed_epoch_sample_and_place_alone(epoch: int) -> None:
    source = SplitLoader(ImagesWritten(), [AddDraw(), AddDraw()], seed=3)
    together = source.fetch(epoch, ids(9, 1, 4))["image"][:, 0, 0, 0].tolist()
    for index, found in zip((9, 1, 4), together, strict=True):
        draws = [uniforms(3, epoch, ids(index), stream, 2)[0, 1] for stream in (0, 1)]
        assert found == (index + sum(int(draw * 200) for draw in draws)) % 256
        assert source.fetch(epoch, ids(index))["image"][0, 0, 0, 0] == found


def test_draws_of_batch_transforms_follow_those_of_sample_transforms() -> None:
    source = SplitLoader(ImagesWritten(), [AddDraw(), WriteDraws(), WriteDraws()], seed=4)
    fetched = source.fetch(2, ids(11, 6))
    finished = source.transform_batch(fetched, 2, CPU)
    expected = np.concatenate([uniforms(4, 2, ids(11, 6), stream, 2) for stream in (1, 2)], axis=1)
    assert finished["image"].tolist() == expected.tolist()


def test_epochs_and_seeds_draw_differently() -> None:
    drawn = {
        (seed, epoch): tuple(
            SplitLoader(ImagesWritten(), [AddDraw()], seed).fetch(epoch, np.arange(20))["image"][:, 0, 0, 0].tolist()
        )
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(drawn.values())) == 9


def test_pixels_do_not_depend_on_the_company() -> None:
    transforms: list[BatchTransform] = [
        RandomCrop([8, 6], padding=2),
        RandomHorizontalFlip(),
        Normalize([0.5] * 3, [0.25] * 3),
    ]
    source = SplitLoader(memory(), transforms, seed=0)
    whole = source.transform_batch(source.fetch(1, np.arange(30)), 1, CPU)
    for numbers in (ids(17), ids(3, 29, 17), np.arange(29, -1, -1)):
        part = source.transform_batch(source.fetch(1, numbers), 1, CPU)
        assert torch.equal(part["image"], whole["image"][torch.from_numpy(numbers)])
        assert torch.equal(part["label"], whole["label"][torch.from_numpy(numbers)])


def test_finishing_leaves_the_fetched_batch_as_it_was() -> None:
    """The first pass of a ratio loss finishes the same batch as the second."""
    source = SplitLoader(memory(), [RandomCrop([8, 6], padding=2), Normalize([0.5] * 3, [0.25] * 3)], seed=0)
    fetched = source.fetch(0, ids(1, 2, 3))
    before = {name: value.clone() for name, value in fetched.items()}
    first, second = (source.transform_batch(fetched, 0, CPU) for _ in range(2))
    assert all(torch.equal(fetched[name], value) for name, value in before.items())
    assert torch.equal(first["image"], second["image"])
