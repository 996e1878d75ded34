from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from scenes import NONE, SHARES, apply, box_of, rectangles, samples
from support.registered import arguments_of

from paceline.core.errors import ArgumentError, DataError
from paceline.core.torchvision_ops import import_torchvision
from paceline.data.batch import Sample
from paceline.data.io.image import Encoded
from paceline.data.transforms.geometric import (
    CenterCrop,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResize,
    RandomResizedCrop,
    RandomShortestSize,
    Resize,
)

import_torchvision()
from torchvision.transforms.functional import _compute_resized_output_size  # noqa: E402
from torchvision.transforms.v2.functional import pad as torchvision_pad  # noqa: E402

PAIRS = [(0, 1), (2, 3)]
BLOCKS = [(2, 4, 12, 10), (20, 16, 30, 28)]


def colors_of_keypoints(sample: Sample, number: int = 0) -> list[int]:
    """The red of the image at each labeled keypoint of an object."""
    image = sample["image"] if sample["image"].ndim == 3 else sample["image"][0]
    return [int(image[int(y), int(x), 0]) for x, y, seen in sample["keypoints"][number] if seen]


# --- by hand ------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 300), st.none() | st.integers(1, 99), st.none() | st.integers(1, 400))
def test_resize_gives_the_size_that_torchvision_gives(
    height: int, width: int, size: int | None, most: int | None
) -> None:
    assume(most is not None if size is None else most is None or most > size)
    expected = _compute_resized_output_size((height, width), size and [size], most, allow_size_none=True)
    assert Resize(size, most).target(height, width) == tuple(max(1, side) for side in expected)


@given(st.integers(1, 300), st.integers(1, 300), st.lists(st.integers(1, 99), min_size=1, max_size=3), SHARES)
def test_the_shortest_size_is_one_of_those_given(height: int, width: int, sizes: list[int], share: float) -> None:
    change, sample = RandomShortestSize(sizes, 120), {"image": np.zeros((height, width, 3), np.uint8)}
    expected = _compute_resized_output_size((height, width), [sizes[int(share * len(sizes))]], 120)
    found = change(sample, np.array([share]))["image"].shape[:2]
    assert found == tuple(max(1, side) for side in expected)


@pytest.mark.parametrize("sizes", [64, [32, 64]])
def test_a_longer_side_below_the_shorter_one_is_refused(sizes: int | list[int]) -> None:
    RandomShortestSize(sizes, 64)
    with pytest.raises(ArgumentError, match=r"max_size: expected at least the largest min_size \(64\), got 63"):
        RandomShortestSize(sizes, 63)


def test_everything_follows_the_shortest_size() -> None:
    image = rectangles(32, 48, BLOCKS) | {"matrix": np.eye(2, 3, dtype=np.float32)}
    result, other = RandomShortestSize([16, 64])(image, np.array([0.5])), RandomShortestSize(64)(image, np.array([0.9]))
    assert result["image"].shape == (*result["mask"].shape, 3) == (64, 96, 3)
    assert result["boxes"].tolist() == [[4, 8, 24, 20], [40, 32, 60, 56]]
    assert [box_of(mask) for mask in result["masks"]] == result["boxes"].tolist()
    assert result["keypoints"][0, 0].tolist() == [5, 9, 1]
    assert result["matrix"].tolist() == [[0.5, 0, 0], [0, 0.5, 0]]
    assert all(np.array_equal(result[name], other[name]) for name in result)


def test_a_height_and_a_width_are_taken_as_they_are() -> None:
    assert Resize([30, 20]).target(50, 100) == (30, 20)
    with pytest.raises(ArgumentError, match="max_size"):
        Resize([30, 20], max_size=40)
    with pytest.raises(ArgumentError, match="size"):
        Resize(None)


def test_resize_by_hand() -> None:
    result = apply(Resize([64, 80]), rectangles(32, 40, BLOCKS))
    assert result["boxes"].tolist() == [[4, 8, 24, 20], [40, 32, 60, 56]]
    assert [box_of(mask) for mask in result["masks"]] == result["boxes"].tolist()
    assert box_of(result["mask"] == 2) == [40, 32, 60, 56]
    assert result["area"].tolist() == [240, 480]
    assert result["keypoints"][0, 0].tolist() == [5, 9, 1]
    assert result["keypoints"][0, 4].tolist() == [0, 0, 0]


def test_resize_loses_no_object_however_small() -> None:
    result = apply(Resize([4, 4]), rectangles(40, 40, [(1, 1, 2, 2), (10, 10, 30, 30)]))
    assert result["classes"].tolist() == [0, 1]
    np.testing.assert_allclose(result["boxes"][0], [0.1, 0.1, 0.2, 0.2], rtol=1e-6)
    assert not result["masks"][0].any()
    assert result["area"].tolist() == pytest.approx([0.01, 4])


def test_random_resize_draws_every_length_and_keeps_the_shape() -> None:
    sample = {"image": np.zeros((10, 20, 3), np.uint8), "mask": np.full((10, 20), 7, np.uint8)}
    seen = [RandomResize(5, 8)(sample, np.array([share])) for share in (0.0, 0.3, 0.6, 0.999999)]
    assert [each["image"].shape for each in seen] == [(5, 10, 3), (6, 12, 3), (7, 14, 3), (8, 16, 3)]
    assert all(each["mask"].shape == each["image"].shape[:2] and (each["mask"] == 7).all() for each in seen)


def test_pad_leaves_coordinates_alone() -> None:
    sample = rectangles(32, 40, BLOCKS)
    result = apply(Pad(size_divisor=16, fill=[1, 2, 3], mask_fill=255), sample)
    assert result["image"].shape == (32, 48, 3)
    assert result["image"][31, 47].tolist() == [1, 2, 3]
    assert (result["mask"][:, 40:] == 255).all()
    assert not result["masks"][..., 40:].any()
    for name in ("boxes", "keypoints", "area"):
        assert np.array_equal(result[name], sample[name])
    assert np.array_equal(result["image"][:, :40], sample["image"])
    assert apply(Pad(size=[50, 20]), sample)["image"].shape == (50, 40, 3)
    assert apply(Pad(size=41), sample)["image"].shape == (41, 41, 3)


@pytest.mark.parametrize(("padding", "sides"), [(3, (3, 3, 3, 3)), ([1, 2, 3, 4], (1, 2, 3, 4)), (0, (0, 0, 0, 0))])
def test_padding_moves_objects_as_torchvision_does(padding: Any, sides: tuple[int, int, int, int]) -> None:
    left, top, right, bottom = sides
    sample = rectangles(32, 40, BLOCKS)
    result = apply(Pad(padding, fill=9), sample)
    expected = torchvision_pad(torch.from_numpy(sample["image"]).permute(2, 0, 1), list(sides), fill=9)
    assert np.array_equal(result["image"], expected.permute(1, 2, 0).numpy())
    assert np.array_equal(result["boxes"], sample["boxes"] + np.array([left, top, left, top]))
    assert result["masks"].shape[1:] == (32 + top + bottom, 40 + left + right)


def test_pad_has_one_goal() -> None:
    for wrong in ({}, {"size": 3, "size_divisor": 4}):
        with pytest.raises(ValidationError, match="give either padding or size or size_divisor"):
            arguments_of("transform", "pad")(**wrong)


def test_center_crop_by_hand() -> None:
    # Rows 8 to 24 and columns 12 to 28 of 32×40: nothing of the first block, 8×8 of the second.
    result = apply(CenterCrop(16), rectangles(32, 40, BLOCKS))
    assert result["boxes"].tolist() == [[8, 8, 16, 16]]
    assert result["classes"].tolist() == [1]
    assert box_of(result["masks"][0]) == box_of(result["mask"] == 2) == [8, 8, 16, 16]
    assert result["keypoints"][0].tolist() == [[8.5, 8.5, 1], *[[0, 0, 0]] * 4]
    assert result["area"].tolist() == [64]
    assert apply(CenterCrop(16, min_visible=0.6), rectangles(32, 40, BLOCKS))["boxes"].shape == (0, 4)


@pytest.mark.parametrize(("length", "start"), [(47, 14), (46, 13), (45, 12), (23, 2), (21, 0), (20, 0)])
def test_the_middle_is_where_torchvision_finds_it(length: int, start: int) -> None:
    """It rounds half of the rest, and a half to the even number."""
    row = np.arange(length, dtype=np.uint8)[None, :, None]
    assert apply(CenterCrop([1, 20]), {"image": row})["image"][0, :, 0].tolist() == list(range(start, start + 20))


def test_center_crop_of_a_small_image_is_filled() -> None:
    result = apply(CenterCrop([6, 2], fill=7, mask_fill=9), rectangles(2, 4, [(1, 0, 3, 2)]))
    assert result["boxes"].tolist() == [[0, 2, 2, 4]]
    assert result["image"][:, 0, 0].tolist() == [7, 7, 50, 50, 7, 7]
    assert result["mask"][:, 0].tolist() == [9, 9, 1, 1, 9, 9]


def test_random_crop_reaches_every_place() -> None:
    sample = {"image": np.arange(20, dtype=np.uint8).reshape(4, 5, 1)}
    crop = RandomCrop([2, 3])
    found = {int(apply(crop, sample, [y, x])["image"][0, 0, 0]) for y in (0, 0.5, 0.99) for x in (0, 0.5, 0.99)}
    assert found == {0, 1, 2, 5, 6, 7, 10, 11, 12}
    wide = apply(RandomCrop([2, 7], fill=99), sample, [0.99, 0.99])["image"][:, :, 0]
    assert wide.tolist() == [[99, 10, 11, 12, 13, 14, 99], [99, 15, 16, 17, 18, 19, 99]]


def test_random_crop_pads_first() -> None:
    sample = {"image": np.arange(1, 5, dtype=np.uint8).reshape(2, 2, 1), "mask": np.full((2, 2), 3, np.uint8)}
    crop = RandomCrop(2, padding=1, fill=9, mask_fill=255)
    corner = apply(crop, sample, [0, 0.99])
    assert corner["image"][:, :, 0].tolist() == [[9, 9], [2, 9]]
    assert corner["mask"].tolist() == [[255, 255], [3, 255]]
    assert apply(crop, sample, [0.5, 0.5])["image"][:, :, 0].tolist() == [[1, 2], [3, 4]]


def test_random_resized_crop_by_hand() -> None:
    crop = RandomResizedCrop(32, scale=(0.25, 0.25), ratio=(1.0, 1.0))
    result = apply(crop, rectangles(32, 32, [(2, 4, 12, 10), (14, 14, 18, 18)]), [0, 0, 0, 0])
    assert result["boxes"].tolist() == [[4, 8, 24, 20], [28, 28, 32, 32]]
    assert [box_of(mask) for mask in result["masks"]] == result["boxes"].tolist()
    assert result["area"].tolist() == [240, 16]
    assert all(color >= 25 for color in colors_of_keypoints(result))  # at the rim it is blended with black


def test_flip_by_hand() -> None:
    sample = rectangles(6, 10, [(1, 2, 4, 5)])
    result = apply(RandomHorizontalFlip(0.5, PAIRS), sample, [0.49])
    assert result["boxes"].tolist() == [[6, 2, 9, 5]]
    assert box_of(result["masks"][0]) == box_of(result["mask"]) == [6, 2, 9, 5]
    # The pixel of joint 1, the right upper one, became the left upper one: the place of joint 0.
    assert result["keypoints"][0].tolist() == [[6.5, 2.5, 2], [8.5, 2.5, 1], [8.5, 4.5, 2], [6.5, 4.5, 2], [0, 0, 0]]
    assert colors_of_keypoints(result) == [50] * 4
    assert np.array_equal(result["image"], sample["image"][:, ::-1])
    assert result["area"].tolist() == [9]
    assert np.array_equal(apply(RandomHorizontalFlip(0.5, PAIRS), sample, [0.5])["image"], sample["image"])


def test_flip_wants_to_know_left_from_right() -> None:
    with pytest.raises(DataError, match="`flip_pairs`"):
        RandomHorizontalFlip(1.0).on_sample(rectangles(4, 4, []), np.zeros(1))
    flipped = RandomHorizontalFlip(1.0).on_sample({"image": np.zeros((2, 2, 3), np.uint8)}, np.zeros(1))
    assert flipped["image"].shape == (2, 2, 3)


def test_flip_keeps_the_way_back() -> None:
    sample: Sample = {"image": np.zeros((4, 10, 3), np.uint8), "matrix": np.array([[2, 0, 5], [0, 2, 7]], np.float32)}
    once = apply(RandomHorizontalFlip(1.0), sample, [0])
    assert (once["matrix"] @ [10, 0, 1]).tolist() == [5, 7]
    assert np.array_equal(apply(RandomHorizontalFlip(1.0), once, [0])["matrix"], sample["matrix"])


def test_fill_has_a_value_for_each_channel() -> None:
    with pytest.raises(DataError, match="fill has 2 values but the images have 3 channels"):
        Pad(size=9, fill=[1, 2])({"image": np.zeros((2, 2, 3), np.uint8)}, NONE)


# --- any sample ---------------------------------------------------------------------------------------------

TRANSFORMS = st.sampled_from(
    [
        Resize(7),
        Resize([9, 50]),
        Resize(None, max_size=11),
        Pad(size=30),
        Pad(size_divisor=8, fill=5),
        CenterCrop([13, 21]),
        RandomCrop(17),
        RandomResizedCrop([12, 9]),
        RandomResizedCrop(33, min_visible=0.0),
        RandomHorizontalFlip(0.6, PAIRS),
    ]
)


@given(samples(), TRANSFORMS, st.tuples(SHARES, SHARES, SHARES, SHARES))
@settings(max_examples=100, deadline=None)
def test_any_sample_can_be_changed(sample: Sample, transform: Any, draws: tuple[float, ...]) -> None:
    changed = apply(transform, sample, draws[: transform.draws])
    assert changed["image"].shape[-1] == sample["image"].shape[-1]


@given(samples(), st.integers(1, 50), st.integers(1, 50), SHARES, SHARES)
@settings(max_examples=50, deadline=None)
def test_masks_and_keypoints_are_cut_as_boxes_are(
    sample: Sample, height: int, width: int, down: float, across: float
) -> None:
    result = apply(RandomCrop([height, width], min_visible=0.0), sample, [down, across])
    if "boxes" in result and "masks" in result:
        assert [box_of(mask) for mask in result["masks"]] == result["boxes"].tolist()
    if "keypoints" in result and "masks" in result:
        for mask, joints in zip(result["masks"], result["keypoints"], strict=True):
            assert all(mask[int(y), int(x)] for x, y, seen in joints if seen)
    if "area" in result and "boxes" in result:
        sides = result["boxes"][:, 2:] - result["boxes"][:, :2]
        np.testing.assert_allclose(result["area"], sides.prod(1), rtol=1e-5)


@given(samples(), st.integers(1, 50), st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_resized_masks_agree_with_boxes_to_a_pixel(sample: Sample, height: int, width: int) -> None:
    result = apply(Resize([height, width]), sample)
    for mask, box in zip(result.get("masks", ()), result.get("boxes", ()), strict=False):
        if mask.any():
            assert np.abs(np.array(box_of(mask)) - box).max() <= 0.5 + 1e-3


@given(samples())
@settings(max_examples=50, deadline=None)
def test_flipping_twice_changes_nothing(sample: Sample) -> None:
    twice = apply(RandomHorizontalFlip(1.0, PAIRS), apply(RandomHorizontalFlip(1.0, PAIRS), sample, [0]), [0])
    assert twice.keys() == sample.keys()
    assert all(np.array_equal(twice[name], sample[name]) for name in sample)


def test_frames_of_a_clip_are_changed_alike() -> None:
    clip = np.random.default_rng(0).integers(0, 256, (3, 20, 30, 3), np.uint8)
    draws = np.array([0.3, 0.6, 0.2, 0.9])
    for transform in (
        Resize(8),
        Pad(size=40),
        CenterCrop(25),
        RandomCrop(7),
        RandomResizedCrop(9),
        RandomHorizontalFlip(1.0),
    ):
        together = apply(transform, {"image": clip}, draws[: transform.draws])["image"]
        alone = [apply(transform, {"image": frame}, draws[: transform.draws])["image"] for frame in clip]
        assert np.array_equal(together, np.stack(alone))


# --- images that are not decoded yet ------------------------------------------------------------------------


class Watched:
    """An encoded image that remembers the size it was decoded to."""

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self.height, self.width = encoded.height, encoded.width
        self.decoded: tuple[int, int] = (0, 0)

    def decode(self, min_height: int = 0, min_width: int = 0) -> NDArray[np.uint8]:
        pixels = self.encoded.decode(min_height, min_width)
        self.decoded = pixels.shape[0], pixels.shape[1]
        return pixels


def photo(folder: Path, height: int, width: int) -> Watched:
    """A JPEG of smooth waves."""
    y, x = np.mgrid[:height, :width]
    waves = [127 + 120 * np.sin(x / a + y / b) for a, b in ((40, 90), (70, -50), (-60, 45))]
    file = folder / f"{height}x{width}.jpg"
    file.write_bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(np.stack(waves, 2).astype(np.uint8)), quality=97))
    return Watched(Encoded.read(file))


@pytest.mark.parametrize(("height", "width"), [(375, 500), (501, 333), (240, 240), (61, 47)])
def test_crops_of_encoded_images_show_the_same(height: int, width: int, tmp_path: Path) -> None:
    encoded = photo(tmp_path, height, width)
    whole = {"image": encoded.decode()}
    for number in range(12):
        draws = np.random.default_rng(number).random(4)
        crop = RandomResizedCrop([40, 56])
        small = crop({"image": encoded}, draws)["image"]
        plain = crop(whole, draws)["image"]
        assert small.shape == plain.shape
        # The window is widened by less than a pixel of what is decoded, which is no larger than one of the result.
        assert np.abs(small.astype(int) - plain).mean() < 4
    for size in (40, [60, 30]):
        small, plain = Resize(size)({"image": encoded}, NONE)["image"], Resize(size)(whole, NONE)["image"]
        assert np.abs(small.astype(int) - plain).mean() < 4


@pytest.mark.parametrize(
    ("area", "size", "reduced"), [(1.0, 100, 2), (1.0, 101, 1), (1.0, 50, 4), (0.25, 100, 1), (0.25, 50, 2)]
)
def test_decoding_is_reduced_as_the_crop_allows(area: float, size: int, reduced: int, tmp_path: Path) -> None:
    encoded = photo(tmp_path, 200, 200)
    RandomResizedCrop(size, scale=(area, area), ratio=(1.0, 1.0))({"image": encoded}, np.full(4, 0.37))
    assert encoded.decoded == (200 // reduced, 200 // reduced)


def test_keypoints_stay_on_their_pixels_in_reduced_images(tmp_path: Path) -> None:
    # A bright square of 16 pixels on black, with a keypoint in its middle, in an image with odd sides.
    for number in range(20):
        generator = np.random.default_rng(number)
        x, y = (int(16 * generator.integers(1, limit)) for limit in (29, 19))
        pixels = np.zeros((333, 499, 3), np.uint8)
        pixels[y : y + 16, x : x + 16] = 255
        file = tmp_path / f"{number}.jpg"
        file.write_bytes(simplejpeg.encode_jpeg(pixels, quality=95))
        mask = (pixels[..., 0] > 0).astype(np.uint8)
        sample = {
            "image": Encoded.read(file),
            "mask": mask,
            "masks": mask[None],
            "keypoints": np.array([[[x + 8, y + 8, 2]]], np.float32),
            "boxes": np.array([[x, y, x + 16, y + 16]], np.float32),
        }
        result = RandomResizedCrop(80, scale=(0.5, 1.0), min_visible=0.9)(sample, generator.random(4))
        for (column, row, _), box in zip(result["keypoints"][:, 0], result["boxes"], strict=True):
            assert result["image"][int(row), int(column), 0] > 200
            assert result["mask"][int(row), int(column)] == 1
            assert np.abs(np.array(box_of(result["image"][..., 0] > 127)) - box).max() < 1.1
            assert np.abs(np.array(box_of(result["masks"][0])) - box).max() < 0.51
