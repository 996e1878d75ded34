"""What is counted over a data set, against numpy on all of it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.batch import Sample
from paceline.data.datasets.image_mask import ImageMask
from paceline.data.inspect import Findings, examine, look


class Named:
    """Samples that are given."""

    def __init__(self, samples: list[Sample], num_classes: int = 3, channels: int = 3) -> None:
        self.samples, self.channels = samples, channels
        self.classes = [str(number) for number in range(num_classes)]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Sample:
        return self.samples[index]


def examined(samples: list[Sample], threads: int = 2, **more: Any) -> Findings:
    findings = Findings()
    done: list[int] = []
    examine(Named(samples, **more), range(len(samples)), findings, threads, done.append)
    assert sum(done) == len(samples)
    return findings


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    channels=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 99),
    threads=st.integers(1, 3),
)
def test_mean_and_deviation_are_those_of_all_pixels(
    sizes: list[tuple[int, int]], channels: int, seed: int, threads: int
) -> None:
    random = np.random.default_rng(seed)
    images = [random.integers(0, 256, (*size, channels), dtype=np.uint8) for size in sizes]
    findings = examined([{"image": image} for image in images], threads, channels=channels)
    pixels = np.concatenate([image.reshape(-1, channels) for image in images]).astype(np.float64) / 255
    mean, std = findings.moments()
    np.testing.assert_allclose(mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std(0), rtol=1e-9, atol=1e-12)
    assert sum(findings.sizes.values()) == len(images)


def test_a_constant_has_no_deviation_at_all() -> None:
    findings = examined([{"image": np.full((7, 5, 3), 201, np.uint8)}] * 9)
    assert findings.moments() == ([201 / 255] * 3, [0.0] * 3)


def test_float_maps_are_no_masks_of_ids() -> None:
    image = np.zeros((4, 6, 3), np.uint8)
    assert "mask" not in examined([{"image": image, "mask": np.full((4, 6), 2.5, np.float32)}]).counts
    assert "mask" in examined([{"image": image, "mask": np.full((4, 6), 2, np.uint8)}]).counts


def test_labels_objects_masks_and_joints_are_counted() -> None:
    image = np.zeros((4, 6, 3), np.uint8)
    keypoints = np.array([[[1, 1, 2], [0, 0, 0]], [[1, 1, 1], [2, 2, 2]]], np.float32)
    samples: list[Sample] = [
        {
            "image": image,
            "label": 2,
            "boxes": np.zeros((2, 4), np.float32),
            "classes": np.array([0, 2]),
            "crowd": np.array([True, False]),
            "keypoints": keypoints,
            "mask": np.array([[0] * 6, [1] * 6, [1] * 6, [255] * 6], np.uint8),
            "size": np.array([40, 60]),
        },
        {"image": image, "label": np.array([1, 0, 1], np.float32), "classes": np.empty(0, np.int64)},
    ]
    findings = examined(samples)
    assert findings.counts["label"].tolist() == [1, 0, 2]
    assert findings.counts["classes"].tolist() == [1, 0, 1]
    assert findings.counts["crowd"].tolist() == [1]
    assert findings.counts["keypoints"].tolist() == [[0, 1, 1], [1, 0, 1]]
    assert [findings.counts["mask"][value] for value in (0, 1, 255)] == [6, 12, 6]
    assert findings.counts["mask"].sum() == 24
    assert dict(findings.objects) == {2: 1, 0: 1}
    assert dict(findings.sizes) == {(40, 60): 1, (4, 6): 1}, "the size before it was decoded smaller"


@pytest.mark.parametrize(
    ("sample", "reported"),
    [
        ({"label": 3}, "the label is 3, but there are 3 classes"),
        ({"label": -1}, "the label is -1"),
        ({"label": np.zeros(2, np.float32)}, r"the label has the shape \[2\]"),
        ({"classes": np.array([0, 9])}, "the class of an object is 9"),
        ({"mask": np.zeros((4, 5), np.uint8)}, "the mask is 5×4 pixels, but its image 6×4"),
        ({"image": np.zeros((4, 6, 1), np.uint8)}, "the image has 1 channels, but the data set 3"),
    ],
)
def test_what_does_not_fit_together_is_an_error(sample: Sample, reported: str) -> None:
    whole = {"image": np.zeros((4, 6, 3), np.uint8), **sample}
    with pytest.raises(DataError, match=reported):
        look(Named([whole]), whole)


def test_an_image_that_cannot_be_decoded_is_reported_with_its_line(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        Image.fromarray(np.full((40, 40), 255, np.uint8)).save(tmp_path / f"{folder}/a.png")
    path = tmp_path / "images/a.png"
    path.write_bytes(path.read_bytes()[:-30])
    (tmp_path / "list.csv").write_text("\nimages/a.png,masks/a.png\n")
    findings = Findings()
    examine(ImageMask(tmp_path, list_file="list.csv", binary=True), range(1), findings, 1, lambda number: None)
    assert [(each.sample, each.path) for each in findings.bad] == [(0, str(path))]
    assert findings.bad[0].reason.startswith(f"{tmp_path}/list.csv, line 2: damaged or truncated")
