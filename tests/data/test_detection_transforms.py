from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scenes import apply, box_of, rectangles, same, samples
from support.registered import arguments_of

from paceline.data.batch import Sample
from paceline.data.transforms.detection import RandomIoUCrop, RandomZoomOut


def draws_of(transform: Any, seed: int) -> Any:
    return np.random.default_rng(seed).random(transform.draws)


def test_zoom_out_by_hand() -> None:
    sample = rectangles(10, 20, [(2, 4, 12, 10)])
    result = apply(RandomZoomOut(side_range=(2.0, 2.0), fill=[1, 2, 3], mask_fill=9), sample, [0.1, 0.7, 0.5, 0.99])
    assert result["image"].shape == (20, 40, 3)
    assert result["boxes"].tolist() == [[22, 9, 32, 15]]  # row int(0.5 · 11), column int(0.99 · 21)
    assert box_of(result["masks"][0]) == [22, 9, 32, 15]
    assert result["image"][0, 0].tolist() == [1, 2, 3]
    assert result["mask"][0, 0] == 9
    assert result["area"].tolist() == [60]
    assert same(apply(RandomZoomOut(p=0.5), sample, [0.5, 0, 0, 0]), sample)


def test_a_canvas_is_not_smaller_than_its_image() -> None:
    with pytest.raises(ValidationError, match=r"side_range\.0"):
        arguments_of("transform", "random_zoom_out")(side_range=[0.5, 2.0])


@given(
    samples(),
    st.sampled_from([RandomZoomOut(p=0.9), RandomIoUCrop(), RandomIoUCrop(sampler_options=(0.0,))]),
    st.integers(0, 10**6),
)
@settings(max_examples=50, deadline=None)
def test_any_sample_can_be_zoomed(sample: Sample, transform: Any, seed: int) -> None:
    zoomed = apply(transform, sample, draws_of(transform, seed))
    assert zoomed["image"].shape[-1] == sample["image"].shape[-1]


def overlap(part: list[float], box: Any) -> float:
    across = max(0, min(part[2], box[2]) - max(part[0], box[0]))
    down = max(0, min(part[3], box[3]) - max(part[1], box[1]))
    union = (part[2] - part[0]) * (part[3] - part[1]) + (box[2] - box[0]) * (box[3] - box[1]) - across * down
    return float(across * down / union)


@pytest.mark.parametrize("least", [0.0, 0.1, 0.5])
def test_parts_overlap_and_hold_middles(least: float) -> None:
    sample = rectangles(100, 120, [(10, 10, 60, 70), (70, 60, 110, 95), (5, 80, 15, 90)])
    # Each pixel tells its place.
    y, x = np.mgrid[:100, :120]
    sample["image"] = np.stack([x, y, 0 * x], 2).astype(np.uint8)
    crop = RandomIoUCrop(sampler_options=(least, 1.0))
    cut = 0
    for seed in range(40):
        draws = draws_of(crop, seed)
        result = apply(crop, sample, draws)
        rows, columns = result["image"].shape[:2]
        left, top = (int(each) for each in result["image"][0, 0, :2])
        part = [left, top, left + columns, top + rows]
        if draws[0] >= 0.5:
            assert part == [0, 0, 120, 100]
            continue
        if part == [0, 0, 120, 100]:
            continue
        cut += 1
        assert 0.5 <= columns / rows <= 2
        assert columns >= 0.3 * 120 - 1
        assert rows >= 0.3 * 100 - 1
        middles = (sample["boxes"][:, :2] + sample["boxes"][:, 2:]) / 2
        held = ((middles > part[:2]) & (middles < part[2:])).all(1)
        assert result["classes"].tolist() == np.flatnonzero(held).tolist()
        assert max(overlap(part, box) for box in sample["boxes"][held]) >= least
        expected = np.clip(sample["boxes"][held] - [left, top, left, top], 0, [columns, rows] * 2)
        assert np.array_equal(result["boxes"], expected)
    assert cut >= 5


def test_without_objects_nothing_is_cut() -> None:
    crop = RandomIoUCrop(sampler_options=(0.0,))
    for sample in (rectangles(30, 30, []), {"image": np.zeros((30, 30, 3), np.uint8)}):
        assert same(apply(crop, sample, np.zeros(crop.draws)), sample)


def test_the_least_scale_is_not_above_the_greatest() -> None:
    arguments = arguments_of("transform", "random_iou_crop")
    for side in ("scale", "aspect_ratio"):
        with pytest.raises(ValidationError, match=rf"min_{side} at most max_{side} \(0\.4\), got 0\.6"):
            arguments(**{f"min_{side}": 0.6, f"max_{side}": 0.4})


def test_as_many_parts_are_tried_as_asked() -> None:
    crop = RandomIoUCrop(trials=3)
    assert crop.draws == 13
    sample = rectangles(30, 30, [(5, 5, 25, 25)])
    assert len(apply(crop, sample, draws_of(crop, 0))["boxes"]) <= 1


def test_the_whole_image_is_one_of_the_choices() -> None:
    crop = RandomIoUCrop()
    sample = rectangles(30, 30, [(5, 5, 25, 25)])
    draws = draws_of(crop, 0)
    draws[0] = 6.5 / 7
    assert same(apply(crop, sample, draws), sample)
