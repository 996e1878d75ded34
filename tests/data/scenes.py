"""Samples with rectangles whose image, mask, masks, boxes, keypoints and areas say the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.data.batch import RAGGED, Sample
from paceline.data.transforms.base import OnSamples

NONE = np.empty(0)
SHARES = st.floats(0, 1, exclude_max=True)


def rectangles(height: int, width: int, boxes: list[tuple[int, int, int, int]], frames: int = 0) -> Sample:
    """Object k paints its box (x1 y1 x2 y2) with the value 50 · (k + 1), in the mask with k + 1.

    Its four keypoints are the middles of the pixels in its corners, the first of them hidden.
    """
    image, mask = np.zeros((height, width, 3), np.uint8), np.zeros((height, width), np.uint8)
    masks = np.zeros((len(boxes), height, width), np.uint8)
    keypoints = np.zeros((len(boxes), 5, 3), np.float32)
    for number, (left, top, right, bottom) in enumerate(boxes):
        image[top:bottom, left:right] = 50 * (number + 1)
        mask[top:bottom, left:right] = number + 1
        masks[number, top:bottom, left:right] = 1
        corners = [(left, top), (right - 1, top), (right - 1, bottom - 1), (left, bottom - 1)]
        keypoints[number, :4] = [(x + 0.5, y + 0.5, 2) for x, y in corners]
    keypoints[:, 0, 2] = 1
    numbers = np.array(boxes, np.float32).reshape(-1, 4)
    return {
        "image": np.stack([image] * frames) if frames else image,
        "mask": mask,
        "boxes": numbers,
        "classes": np.arange(len(boxes), dtype=np.int64),
        "masks": masks,
        "keypoints": keypoints,
        "crowd": np.zeros(len(boxes), np.bool_),
        "area": (numbers[:, 2] - numbers[:, 0]) * (numbers[:, 3] - numbers[:, 1]),
        "size": np.array([height, width]),
        "label": 3,
    }


def copied(sample: Sample) -> Sample:
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def same(one: Sample, other: Sample) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def on_samples(transform: Any) -> Any:
    """The transform as it runs on single samples."""
    return OnSamples(transform) if hasattr(transform, "on_sample") else transform


def apply(transform: Any, sample: Sample, draws: Any = NONE) -> Sample:
    """The changed sample, after looking whether it obeys what holds for all transforms of samples."""
    before = copied(sample)
    transform = on_samples(transform)
    result: Sample = transform(sample, np.asarray(draws, np.float64))
    assert same(sample, before), "what is given stays as it is"
    assert same(transform(sample, np.asarray(draws, np.float64)), result), "the same draws do the same"
    check(result, sample)
    return result


def check(result: Sample, sample: Sample) -> None:
    height, width = result["image"].shape[-3:-1]
    assert result.keys() - {"matrix"} == sample.keys() - {"matrix"}
    for name, value in sample.items():
        if isinstance(value, np.ndarray):
            assert result[name].dtype == value.dtype, name
            assert result[name].ndim == value.ndim, name
    if "size" in sample:
        assert np.array_equal(result["size"], sample["size"])
    assert result.get("mask", result["image"][..., 0]).shape[-2:] == (height, width)
    assert len({len(result[name]) for name in RAGGED & result.keys()}) <= 1
    if "boxes" in result:
        boxes = result["boxes"]
        assert np.isfinite(boxes).all()
        assert (boxes >= 0).all()
        assert (boxes <= [width, height, width, height]).all()
        assert (boxes[:, :2] <= boxes[:, 2:]).all()
    if "masks" in result:
        assert result["masks"].shape[1:] == (height, width)
    if "keypoints" in result:
        places, seen = result["keypoints"][..., :2], result["keypoints"][..., 2]
        assert np.isfinite(places).all()
        assert (places[seen == 0] == 0).all()
        assert (places >= 0).all()
        assert (places < [width, height]).all()
    if "area" in result:
        assert np.isfinite(result["area"]).all()


def box_of(mask: NDArray[np.uint8]) -> list[int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


@st.composite
def samples(draw: st.DrawFn, longest: int = 40) -> Sample:
    """Any sample: any size, objects of any number, perhaps a clip, perhaps without some of the fields."""
    height, width = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    boxes = []
    for _ in range(draw(st.integers(0, 3))):
        left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
        boxes.append((left, top, draw(st.integers(left + 1, width)), draw(st.integers(top + 1, height))))
    sample = rectangles(height, width, boxes, draw(st.sampled_from([0, 0, 2])))
    left_out = draw(st.sets(st.sampled_from(["mask", "boxes", "masks", "keypoints", "area", "crowd"]), max_size=4))
    sample = {name: value for name, value in sample.items() if name not in left_out}
    if draw(st.booleans()):
        sample["image"] = sample["image"][..., :1]
    return sample
