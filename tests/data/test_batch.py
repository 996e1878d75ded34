"""Samples put together: channels first for images and clips, objects as lists, and sizes that must agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import DataError
from paceline.data.batch import RAGGED, Batch, Collator, collate

SIDES = st.integers(1, 5)


@given(st.integers(1, 4), st.lists(SIDES, min_size=2, max_size=4), st.integers(1, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_channels_come_before_frames_rows_and_columns(count: int, sides: list[int], channels: int, cut: bool) -> None:
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (*sides, channels), dtype=np.uint8) for _ in range(count)]
    if cut:  # a view with other strides than its own
        images = [np.repeat(image, 2, axis=-2)[..., ::2, :] for image in images]
    found = collate(range(count), [{"image": image} for image in images])["image"]
    assert found.is_contiguous()
    for image, tensor in zip(images, found, strict=True):
        moved = np.moveaxis(image, -1, -3 if len(sides) == 2 else -4)
        assert (tensor.numpy() == moved).all()


def test_objects_stay_apart_and_are_copied() -> None:
    boxes = [np.zeros((number, 4), np.float32) for number in (2, 0, 3)]
    boxes[0].flags.writeable = False
    samples = [
        {
            "image": np.zeros((2, 2, 3), np.uint8),
            "boxes": each,
            "classes": np.arange(len(each)),
            "size": np.array([2, 2]),
        }
        for each in boxes
    ]
    batch = collate([5, 6, 7], samples)
    assert [len(each) for each in batch["boxes"]] == [2, 0, 3]
    assert batch["boxes"][1].shape == (0, 4)
    assert batch["classes"][2].dtype == torch.int64
    assert batch["size"].shape == (3, 2)
    assert {name for name, value in batch.items() if isinstance(value, list)} == {"boxes", "classes"} < RAGGED
    batch["boxes"][0].add_(1)
    assert boxes[0].max() == 0


def test_what_python_decides_by_stays_on_the_host() -> None:
    boxes, crowd = torch.zeros(2, 4), torch.tensor([False, True])
    moved = Batch(id=torch.arange(1), boxes=[boxes], crowd=[crowd]).to(torch.device("meta"))
    assert {name: value.device.type for name, value in ((each, moved[each][0]) for each in moved)} == {
        "id": "cpu",
        "boxes": "meta",
        "crowd": "cpu",
    }


def test_room_that_is_not_needed_is_not_in_the_batch() -> None:
    together = Collator(4)
    for index in (8, 3):
        together.add(index, {"image": np.full((2, 3, 3), index, np.uint8), "label": index})
    batch = together.batch()
    assert (batch.ids.tolist(), batch["label"].tolist(), batch["image"].shape) == ([8, 3], [8, 3], (2, 3, 2, 3))
    assert batch["image"][:, 0, 0, 0].tolist() == [8, 3]


@pytest.mark.parametrize(
    ("other", "message"), [((2, 4, 5, 3), r"\(3 × 5×4 and 2 × 5×4\)"), ((3, 4, 6, 3), r"\(3 × 5×4 and 3 × 6×4\)")]
)
def test_clips_of_different_sizes_are_refused(other: tuple[int, ...], message: str) -> None:
    clips = [{"image": np.zeros(shape, np.uint8)} for shape in ((3, 4, 5, 3), other)]
    with pytest.raises(DataError, match=f"samples 1 and 2 differ in size {message}"):
        collate([1, 2], clips)
