from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.data.datasets.idx import MemoryImages
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.batch import MultiScale
from paceline.data.transforms.geometric import RandomHorizontalFlip


def draw(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def scene() -> dict[str, Any]:
    masks = torch.zeros(1, 4, 6, dtype=torch.uint8)
    masks[0, 1:3, 2:5] = 1
    return {
        "image": (torch.arange(144) % 256).to(torch.uint8).view(2, 3, 4, 6),
        "mask": torch.arange(48, dtype=torch.uint8).view(2, 4, 6),
        "boxes": [torch.tensor([[2.0, 1, 5, 3]]), torch.empty(0, 4)],
        "classes": [torch.tensor([1]), torch.empty(0, dtype=torch.int64)],
        "masks": [masks, masks[:0]],
        "keypoints": [torch.tensor([[[2.5, 1.5, 2], [0, 0, 0]]]), torch.empty(0, 2, 3)],
        "area": [torch.tensor([6.0]), torch.empty(0)],
        "matrix": torch.eye(2, 3).repeat(2, 1, 1),
    }


@pytest.mark.parametrize(("value", "size"), [(0.0, 4), (0.33, 4), (0.34, 6), (0.67, 8), (0.999, 8)])
def test_the_draw_chooses_the_size(value: float, size: int) -> None:
    result = MultiScale([4, 6, 8])({"image": torch.zeros(2, 3, 5, 5)}, draw(value))
    assert result["image"].shape == (2, 3, size, size)


def test_everything_is_scaled() -> None:
    given = scene()
    result = MultiScale([[8, 18]])(given, draw(0.5))
    assert result["image"].shape == (2, 3, 8, 18)
    assert result["image"].dtype == torch.uint8
    assert torch.equal(result["mask"], given["mask"].repeat_interleave(2, 1).repeat_interleave(3, 2))
    assert torch.equal(result["masks"][0], given["masks"][0].repeat_interleave(2, 1).repeat_interleave(3, 2))
    assert result["masks"][1].shape == (0, 8, 18)
    assert result["boxes"][0].tolist() == [[6, 2, 15, 6]]
    assert result["keypoints"][0].tolist() == [[[7.5, 3, 2], [0, 0, 0]]]
    assert result["area"][0].tolist() == [36]
    assert result["classes"] is given["classes"]
    assert (result["matrix"][0] @ torch.tensor([15.0, 6, 1])).tolist() == [5, 3]
    assert all(torch.equal(given[name], scene()[name]) for name in ("image", "mask"))


def test_shrinking_averages_masks_excepted() -> None:
    images = torch.tensor([[0, 100] * 4] * 8, dtype=torch.uint8).view(1, 1, 8, 8)
    mask = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]] * 8, dtype=torch.uint8).view(1, 8, 8)
    result = MultiScale([2])({"image": images, "mask": mask}, draw(0))
    assert (result["image"].float() - 50).abs().max() < 8
    assert result["mask"][0, 0].tolist() == [2, 6]  # the pixels that hold the middles, 2.0 and 6.0


def test_the_present_size_costs_nothing() -> None:
    batch = scene()
    assert MultiScale([[4, 6]])(batch, draw(0)) is batch


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(*[st.integers(1, 9)] * 4),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1, exclude_max=True),
)
def test_shapes_and_frames(
    sides: tuple[int, int, int, int], frames: int, is_clip: bool, is_whole: bool, value: float
) -> None:
    height, width, rows, columns = sides
    shape = (2, 3, frames, height, width) if is_clip else (2, 3, height, width)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    images = images if is_whole else images.float()
    result = MultiScale([[rows, columns], [height, width]])({"image": images}, draw(value))["image"]
    expected = (rows, columns) if value < 0.5 else (height, width)
    assert result.shape == (*shape[:-2], *expected)
    assert result.dtype == images.dtype
    if is_clip:
        alone = MultiScale([[rows, columns], [height, width]])({"image": images[:, :, 0]}, draw(value))["image"]
        assert torch.equal(result[:, :, 0], alone)


def test_whole_pixels_are_those_of_floats_rounded() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 20, 17), np.uint8))
    exact = F.interpolate(images.double(), (11, 23), mode="bilinear", antialias=True)
    found = MultiScale([[11, 23]])({"image": images}, draw(0))["image"]
    assert (found.double() - exact).abs().max() <= 1


def test_all_of_a_step_have_one_size_wherever_they_are_computed() -> None:
    images = torch.zeros(40, 1, 6, 6, dtype=torch.uint8)
    sizes = [4, 5, 7, 8]

    def side(seed: int, step: int, epoch: int, *ids: int) -> int:
        source = SplitLoader(MemoryImages(images, {}, []), [RandomHorizontalFlip(), MultiScale(sizes)], seed)
        finished = source.transform_batch(source.fetch(epoch, np.array(ids)), epoch, torch.device("cpu"), step)
        return int(finished["image"].shape[-1])

    drawn = [side(1, step, step // 10, 0, 1) for step in range(60)]
    assert drawn == [side(1, step, step // 10, 39, 5, 6) for step in range(60)]
    assert drawn != [side(2, step, step // 10, 0, 1) for step in range(60)]
    counts = [drawn.count(size) for size in sizes]
    assert min(counts) >= 6
