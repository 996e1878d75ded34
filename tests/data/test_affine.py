from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import SHARES, apply, box_of, rectangles, samples

from paceline.data.batch import Sample
from paceline.data.transforms.annotations import transform_points
from paceline.data.transforms.functional import warp_affine
from paceline.data.transforms.geometric import PoseCrop, RandomAffine, RandomRotation, affine_matrix

LAST = 1 - 1e-12


def test_a_quarter_turn_by_hand() -> None:
    # Clockwise around the middle of a square: (x, y) goes to (20 − y, x).
    sample = rectangles(20, 20, [(2, 4, 12, 10)])
    result = apply(RandomRotation(90), sample, [LAST])
    assert np.array_equal(result["image"], np.rot90(sample["image"], -1))
    assert np.array_equal(result["mask"], np.rot90(sample["mask"], -1))
    assert np.array_equal(result["masks"][0], np.rot90(sample["masks"][0], -1))
    np.testing.assert_allclose(result["boxes"], [[10, 2, 16, 12]], atol=1e-4)
    np.testing.assert_allclose(result["keypoints"][0, 1], [15.5, 11.5, 2], atol=1e-4)
    assert result["area"].tolist() == pytest.approx([60])


def test_without_masks_the_turned_corners_are_surrounded() -> None:
    sample = rectangles(40, 40, [(15, 15, 25, 25)])
    tight = apply(RandomRotation(45), sample, [LAST])["boxes"][0]
    del sample["masks"]
    loose = apply(RandomRotation(45), sample, [LAST])["boxes"][0]
    half = 5 * np.sqrt(2)
    np.testing.assert_allclose(loose, [20 - half, 20 - half, 20 + half, 20 + half], atol=1e-4)
    assert np.abs(tight - loose).max() <= 1
    assert tight.tolist() == np.round(tight).tolist()


def test_no_change_changes_nothing() -> None:
    sample = rectangles(17, 23, [(2, 4, 12, 10), (0, 0, 23, 17)])
    result = apply(RandomAffine(degrees=30, translate=(0.3, 0.3), shear=20), sample, [0.5] * 5)
    for name, value in sample.items():
        np.testing.assert_allclose(result[name], value, err_msg=name)


def test_scale_and_shift_by_hand() -> None:
    # Twice as large around the middle (10, 10), then 4 to the right and 2 up.
    sample = rectangles(20, 20, [(8, 9, 12, 11)])
    draws = [0.5, 0.5, 1.0, 0.25, 0.5]
    result = apply(RandomAffine(scale=(2.0, 2.0), translate=(0.2, 0.2)), sample, draws)
    assert result["boxes"].tolist() == [[10, 6, 18, 10]]
    assert box_of(result["masks"][0]) == box_of(result["mask"]) == [10, 6, 18, 10]
    assert result["keypoints"][0, 0].tolist() == [11, 7, 1]
    assert result["area"].tolist() == [32]


def test_shear_by_hand() -> None:
    # By 45°, what lies 5 below the middle goes 5 to the right.
    matrix = affine_matrix((10, 10), (10, 10), 0, shear=45)
    np.testing.assert_allclose(transform_points(matrix, np.array([[10.0, 15.0], [12.0, 10.0]])), [[15, 15], [12, 10]])


def test_corners_are_filled() -> None:
    sample = rectangles(20, 20, [])
    result = apply(RandomRotation(45, fill=[9, 8, 7], mask_fill=11), sample, [0.0])
    assert result["image"][0, 0].tolist() == [9, 8, 7]
    assert result["mask"][0, 0] == 11
    assert result["image"][10, 10].tolist() == [0, 0, 0]


def test_what_is_moved_out_is_removed() -> None:
    sample = rectangles(20, 20, [(0, 0, 4, 4), (8, 8, 12, 12)])
    result = apply(RandomAffine(translate=(1.0, 1.0)), sample, [0.5, 0.5, 0.4, 0.5, 0.5])  # 4 to the left
    assert result["classes"].tolist() == [1]
    assert result["boxes"].tolist() == [[4, 8, 8, 12]]


def test_shrinking_much_averages() -> None:
    image = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    small = warp_affine({"image": image}, affine_matrix((128, 128), (16, 16), 10, 1 / 8), (32, 32))["image"]
    # Single pixels of noise are off by 74 on average, means of 4×4 of them by 18.
    assert small[8:24, 8:24].std() < 25
    assert small[8:24, 8:24].mean() == pytest.approx(127.5, abs=5)


@given(
    st.integers(0, 10**6),
    st.floats(-180, 180),
    st.floats(0.7, 1.6),
    st.floats(-40, 40),
)
@settings(max_examples=40, deadline=None)
def test_a_keypoint_stays_on_its_colored_pixel(seed: int, degrees: float, scale: float, shear: float) -> None:
    generator = np.random.default_rng(seed)
    left, top = (int(each) for each in generator.integers(4, 30, 2))
    sample = rectangles(44, 40, [(left, top, left + 6, top + 6)])
    sample["keypoints"] = np.array([[[left + 3, top + 3, 2]]], np.float32)
    result = warp_affine(sample, affine_matrix((20, 22), (20, 22), degrees, scale, shear), (44, 40))
    x, y, seen = result["keypoints"][0, 0]
    if seen and 2 < x < 38 and 2 < y < 42:
        assert result["image"][int(y), int(x), 0] == 50
        assert result["mask"][int(y), int(x)] == 1
        assert result["masks"][0, int(y), int(x)] == 1


TRANSFORMS = st.sampled_from(
    [
        RandomRotation(180),
        RandomRotation(20, min_visible=0.0),
        RandomAffine(40, (0.4, 0.4), (0.2, 3.0), 30),
        PoseCrop([24, 18], scale=(0.6, 1.6), degrees=60),
        PoseCrop([7, 40]),
    ]
)


@given(samples(), TRANSFORMS, st.tuples(SHARES, SHARES, SHARES, SHARES, SHARES))
@settings(max_examples=60, deadline=None)
def test_any_sample_can_be_moved(sample: Sample, transform: Any, draws: tuple[float, ...]) -> None:
    moved = apply(transform, sample, draws[: transform.draws])
    assert moved.keys() >= {"image"}
    assert moved["image"].shape[-1] == sample["image"].shape[-1]


def test_frames_of_a_clip_are_moved_alike() -> None:
    clip = np.random.default_rng(0).integers(0, 256, (3, 20, 30, 3), np.uint8)
    together = apply(RandomRotation(30), {"image": clip}, [0.9])["image"]
    assert np.array_equal(
        together, np.stack([apply(RandomRotation(30), {"image": one}, [0.9])["image"] for one in clip])
    )


# --- poses --------------------------------------------------------------------------------------------------


def test_pose_crop_by_hand() -> None:
    # A box of 10×20 shown at 40×30: 20 · 1.25 / 40 = 0.625 pixels a new one, the box in the middle.
    sample = rectangles(60, 60, [(20, 10, 30, 30), (40, 40, 50, 50)])
    result = apply(PoseCrop([40, 30]), sample, [0.5, 0.5])
    assert result["image"].shape == (40, 30, 3)
    np.testing.assert_allclose(result["boxes"], [[7, 4, 23, 36]], atol=1e-5)
    assert result["classes"].tolist() == [0]
    assert box_of(result["masks"][0]) == [7, 4, 23, 36]
    np.testing.assert_allclose(result["matrix"], [[0.625, 0, 25 - 0.625 * 15], [0, 0.625, 20 - 0.625 * 20]])
    assert result["matrix"].dtype == np.float32
    assert result["area"].tolist() == pytest.approx([200 / 0.625**2])


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_the_matrix_leads_back(seed: int) -> None:
    generator = np.random.default_rng(seed)
    sample = rectangles(60, 50, [(20, 10, 30, 30)])
    sample["matrix"] = np.array([[2, 0, 3], [0, 4, 5]], np.float32)  # of a resize before
    result = apply(PoseCrop([64, 48], scale=(1.0, 1.5), degrees=40), sample, generator.random(2))
    seen = result["keypoints"][0, :, 2] > 0
    assert seen.any()
    back = transform_points(result["matrix"].astype(np.float64), result["keypoints"][0, seen, :2])
    np.testing.assert_allclose(back, sample["keypoints"][0, seen, :2] * [2, 4] + [3, 5], atol=1e-3)


def test_scale_and_rotation_of_pose_crops_are_drawn() -> None:
    sample = rectangles(60, 60, [(20, 20, 40, 40)])
    crop = PoseCrop([40, 40], margin=1.0, scale=(0.5, 2.0), degrees=90)
    wide = apply(crop, sample, [0.5, LAST])
    np.testing.assert_allclose(wide["boxes"], [[10, 10, 30, 30]], atol=1e-4)
    turned = apply(crop, sample, [LAST, LAST])
    np.testing.assert_allclose(turned["keypoints"][0, 0], [29.5, 10.5, 1], atol=1e-4)  # was left, above


def test_pose_crop_does_without_a_box() -> None:
    sample = rectangles(60, 60, [(20, 10, 30, 30)])
    keypoints = {name: sample[name] for name in ("image", "keypoints")}
    np.testing.assert_allclose(
        apply(PoseCrop([38, 38], margin=2.0), keypoints, [0.5, 0.5])["keypoints"][0, :4, 1], [9.5, 9.5, 28.5, 28.5]
    )
    nobody = apply(PoseCrop([30, 30], margin=1.0), rectangles(60, 60, []), [0.5, 0.5])
    np.testing.assert_allclose(nobody["matrix"], [[2, 0, 0], [0, 2, 0]])
    unseen = {"image": sample["image"], "keypoints": np.zeros((1, 3, 3), np.float32)}
    np.testing.assert_allclose(apply(PoseCrop([30, 30], margin=1.0), unseen, [0.5, 0.5])["matrix"][0], [2, 0, 0])
