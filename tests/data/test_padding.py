"""Images of different sizes in one batch: padded on the right and below, zero behind normalization, else refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.data.batch import Batch, collate
from paceline.data.padding import Padding, flip_planes
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import MultiScale, Normalize, RandomErasing
from paceline.data.transforms.geometric import RandomHorizontalFlip

SIZES = [(5, 7), (5, 7), (8, 4), (5, 7), (6, 9)]
CPU = torch.device("cpu")
NORMALIZE = Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])


class Images:
    """Images of these sizes with masks of ones."""

    classes = ["background", "thing"]
    channels = 3

    def __init__(self, sizes: list[tuple[int, int]], kind: str = "uint8") -> None:
        generator = np.random.default_rng(0)
        self.images = [generator.integers(1, 256, (*size, 3)).astype(kind) for size in sizes]

    def __len__(self) -> int:
        return len(self.images)

    def path(self, index: int) -> str:
        return f"images/{index}.png"

    def read(self, index: int) -> dict[str, Any]:
        image = self.images[index]
        return {"image": image, "mask": np.ones(image.shape[:2], np.uint8), "boxes": np.zeros((index, 4), np.float32)}


def loader(dataset: Any, *transforms: Any, padding: Padding | None = Padding(255)) -> SplitLoader:  # noqa: B008
    made = SplitLoader(dataset, transforms, seed=3)
    made.padding = padding
    return made


def ready(made: SplitLoader, *ids: int) -> Batch:
    return made.transform_batch(made.fetch(0, np.array(ids)), 0, CPU)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 6]), st.integers(1, 5), st.sampled_from(["uint8", "float32"]),
)  # fmt: skip
def test_images_lie_in_the_upper_left_corner_of_the_smallest_size_that_holds_all(
    sizes: list[tuple[int, int]], channels: int, divisible: int, kind: str
) -> None:
    generator = np.random.default_rng(0)
    images = [generator.integers(1, 256, (*size, channels)).astype(kind) for size in sizes]
    samples = [{"image": image, "mask": np.ones(image.shape[:2], np.uint8)} for image in images]
    batch = collate(range(len(sizes)), samples, Padding(7, divisible))
    largest = np.ceil(np.max(sizes, 0) / divisible).astype(int) * divisible
    assert batch["image"].shape == (len(sizes), channels, *largest)
    assert batch["mask"].shape == (len(sizes), *largest)
    assert ("image_size" in batch) == any(tuple(largest) != size for size in sizes)
    for index, image in enumerate(images):
        expected = np.zeros((channels, *largest), kind)
        expected[:, : image.shape[0], : image.shape[1]] = np.moveaxis(image, -1, 0)
        assert np.array_equal(batch["image"][index].numpy(), expected)
        assert np.array_equal(batch.image(index).numpy(), np.moveaxis(image, -1, 0))
        assert (batch["mask"][index] == 1).sum() == image.shape[0] * image.shape[1]
    is_inside = batch.is_inside()
    assert is_inside is None or torch.equal(is_inside, batch["mask"] == 1)


def test_images_of_one_size_are_stacked_as_without_padding() -> None:
    samples = [Images([(4, 6)] * 3).read(index) for index in range(3)]
    padded, plain = collate(range(3), samples, Padding(255)), collate(range(3), samples)
    assert padded.keys() == plain.keys()
    assert torch.equal(padded["image"], plain["image"])
    assert padded["image"].is_contiguous()


@pytest.mark.parametrize("kind", ["uint8", "float32"])
@pytest.mark.parametrize(
    "transforms", [[NORMALIZE], [], [RandomErasing(p=1.0, value=9.0), NORMALIZE, RandomErasing(p=1.0, value=9.0)]]
)
def test_a_sample_is_the_same_whatever_it_is_padded_with(kind: str, transforms: list[Any]) -> None:
    made = loader(Images(SIZES, kind), *transforms)
    batch = ready(made, 0, 2, 4)
    is_inside = batch.is_inside()
    assert is_inside is not None
    assert not (batch["image"] * ~is_inside[:, None]).any()
    for place, index in enumerate((0, 2, 4)):
        assert torch.equal(batch.image(place), ready(made, index)["image"][0])


def test_sizes_stay_on_the_host() -> None:
    batch = loader(Images(SIZES)).fetch(0, np.array([0, 2]))
    moved = batch.to(torch.device("meta"))
    assert (moved["image"].device.type, moved["image_size"].device.type) == ("meta", "cpu")
    assert moved.image_sizes == [(5, 7), (8, 4)]


@pytest.mark.parametrize("late", [RandomHorizontalFlip(), MultiScale([8])])
def test_a_transform_that_would_move_padding_is_refused_where_sizes_differ(late: Any) -> None:
    made = loader(Images(SIZES), NORMALIZE, late)
    name = "multi_scale" if isinstance(late, MultiScale) else "random_horizontal_flip"
    with pytest.raises(DataError, match=rf"{name} works on whole batches.*add a transform that gives one size"):
        ready(made, 0, 2)


def test_without_padding_the_error_names_the_file_and_both_sizes() -> None:
    with pytest.raises(DataError, match=r"images/2.png: samples 0 and 2 differ in size \(7×5 and 4×8\).*add a tra"):
        ready(loader(Images(SIZES), padding=None), 0, 2)


def test_a_mask_of_another_size_than_its_image_is_refused() -> None:
    samples = [{"image": np.zeros((side, 4, 3), np.uint8), "mask": np.zeros((2, 4), np.uint8)} for side in (2, 3)]
    with pytest.raises(DataError, match=r"a mask of shape \[2, 4\] lies on an image of 4×3"):
        collate([0, 1], samples, Padding())


def test_samples_cannot_bring_sizes_of_their_own() -> None:
    with pytest.raises(DataError, match="image_size"):
        collate([0], [{"image": np.zeros((2, 2, 3), np.uint8), "image_size": np.array([9, 9])}])


def test_planes_are_flipped_within_their_own_width() -> None:
    planes = torch.arange(2 * 3 * 4.0).view(2, 1, 3, 4) + 1
    flipped = flip_planes(planes, [(3, 4), (2, 3)])
    assert torch.equal(flipped[0], planes[0].flip(-1))
    assert torch.equal(flipped[1, :, :2, :3], planes[1, :, :2, :3].flip(-1))
    assert flipped[1].count_nonzero() == 6
    assert torch.equal(flip_planes(planes, None), planes.flip(-1))
