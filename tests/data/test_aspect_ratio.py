"""Steps of images of similar shape: each sample once an epoch, groups apart, any position at once, any world alike."""

from __future__ import annotations

import json
import tracemalloc
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.core.intervals import Progress
from paceline.core.world import World
from paceline.data.aspect_ratio import GroupedPermutation, group_by_aspect_ratio
from paceline.data.datasets.coco import Coco
from paceline.data.datasets.image_mask import ImageMask
from paceline.data.io.image import read_size
from paceline.data.loader import TrainBatches
from paceline.data.pack import PackedSamples, write_pack
from paceline.data.sampler import BatchSampler
from paceline.data.split_loader import SplitLoader

GROUPS = st.lists(st.integers(0, 5), min_size=1, max_size=300).map(lambda each: np.array(each, np.uint8))


@settings(deadline=None, max_examples=60)
@given(GROUPS, st.integers(1, 40), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_every_sample_comes_once_and_batches_are_pure_but_for_remainders(
    groups: Any, batch: int, seed: int, epoch: int
) -> None:
    order = GroupedPermutation(groups, batch, seed)
    samples = order.at(epoch, 0, len(groups))
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(len(groups)))
    batches = [samples[start : start + batch] for start in range(0, len(groups), batch)]
    pure = Counter(int(groups[each[0]]) for each in batches if len(each) == batch and len(set(groups[each])) == 1)
    counts = np.bincount(groups)
    assert all(pure[group] >= count // batch for group, count in enumerate(counts.tolist()))
    remaining = sum(count % batch for count in counts.tolist())
    assert len(batches) - sum(counts // batch) == -(-remaining // batch)
    for position in (0, len(groups) // 2, len(groups) - 1):  # of an order that was asked for nothing else
        fresh = GroupedPermutation(groups, batch, seed).at(epoch, position, len(groups))
        assert np.array_equal(fresh, samples[position:])


def test_the_order_is_the_one_it_always_was() -> None:
    groups = np.array([0, 1, 1, 0, 2, 1, 0, 1, 1, 0, 1, 0, 2, 1, 0], np.uint8)
    assert GroupedPermutation(groups, 4, 11).at(3, 0, 15).tolist() == [14, 9, 0, 11, 7, 2, 1, 10, 6, 3, 5, 8, 13, 12, 4]


def test_remainders_come_at_any_time_and_are_others_in_each_epoch() -> None:
    groups = np.array([0] * 31 + [1] * 34, np.uint8)
    order = GroupedPermutation(groups, 4, 7)
    orders = [order.at(epoch, 0, 65) for epoch in range(60)]
    assert len({each.tobytes() for each in orders}) == 60
    mixed = [[len(set(groups[each[start : start + 4]])) > 1 for start in range(0, 64, 4)] for each in orders]
    assert set(np.argwhere(mixed)[:, 1]) > set(range(10))
    assert len({int(each[64]) for each in orders}) > 15
    assert len({int(GroupedPermutation(groups, 4, seed).at(0, 0, 1)[0]) for seed in range(40)}) > 15


def test_members_of_a_group_lie_far_apart() -> None:
    """More samples than are looked through at a time."""
    groups = np.zeros(10_000, np.uint8)
    groups[[0, 1023, 1024, 5000, 9999]] = 3
    samples = GroupedPermutation(groups, 5, 1).at(0, 0, 10_000)
    assert np.array_equal(np.sort(samples), np.arange(10_000))
    assert [0, 1023, 1024, 5000, 9999] in [sorted(samples[start : start + 5].tolist()) for start in range(0, 10_000, 5)]


def test_memory_is_a_byte_a_sample_and_a_late_step_costs_no_more() -> None:
    size = 2_000_000
    groups = (np.arange(size) % 7 > 2).astype(np.uint8)
    GroupedPermutation(groups[:5000], 16, 0).at(0, 0, 64)
    tracemalloc.start()
    try:
        order = GroupedPermutation(groups, 16, 0)
        _, building = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        held, _ = tracemalloc.get_traced_memory()
        order.at(9, size - 1600, size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert building < size
    assert held < size // 10
    assert peak < 2**20


@pytest.mark.parametrize("factor", [0, 1, 3])
def test_groups_are_those_of_torchvisions_references(factor: int) -> None:
    sizes = np.random.default_rng(0).integers(1, 900, (500, 2))
    sizes[:3] = [[100, 200], [200, 100], [50, 50]]
    bounds = (2 ** np.linspace(-1, 1, 2 * factor + 1)).tolist() if factor > 0 else [1.0]
    expected = [bisect_right(bounds, width / height) for height, width in sizes.tolist()]
    assert group_by_aspect_ratio(sizes, factor).tolist() == expected


class Numbered:
    """Images that hold their own number."""

    classes: list[str] = []
    channels = 3

    def __len__(self) -> int:
        return 45

    def read(self, index: int) -> dict[str, Any]:
        return {"image": np.full((2, 2, 3), index, np.uint8), "label": index}


def steps(world: int, first: int = 0) -> list[list[int]]:
    """The samples of each global batch from a step on, as the ranks of a world load them, in order."""
    groups = np.random.default_rng(0).integers(0, 3, 45).astype(np.uint8)
    loaded: list[list[int]] = []
    for rank in range(world):
        batches = TrainBatches(
            SplitLoader(Numbered(), [], 0), BatchSampler(45, 8, 2),
            World(rank, world, rank, torch.device("cpu")), Progress(18, 6, first), workers=0,
            order=GroupedPermutation(groups, 8, 4),
        )  # fmt: skip
        for place, step in enumerate(batches):
            loaded += [[]] * (place == len(loaded))
            loaded[place] = loaded[place] + [
                label for each in step.micro_batches for label in each.batch["label"].tolist()
            ]
    return loaded


def test_steps_hold_the_same_on_any_number_of_processes_and_resume_anywhere() -> None:
    alone = steps(1)
    epochs = [[label for step in alone[start : start + 6] for label in step] for start in (0, 6, 12)]
    assert [sorted(each) for each in epochs] == [list(range(45))] * 3
    assert steps(2) == steps(3) == alone
    assert steps(2, first=9) == alone[9:]


def write_images(folder: Path) -> list[tuple[int, int]]:
    """Images as height and width, with masks; one lies on its side, and one has much before its size."""
    sizes = [(20, 30), (30, 20), (40, 16), (24, 48)]
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number, (height, width) in enumerate(sizes):
        image, exif = Image.new("RGB", (width, height), (number, 9, 9)), Image.Exif()
        if number == 2:
            image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), 6
        profile = bytes(60_000) * 3 if number == 3 else b""
        image.save(folder / "images" / f"{number}.jpg", exif=exif, icc_profile=profile)
        Image.new("L", (width, height), number % 2).save(folder / "masks" / f"{number}.png")
    return sizes


def test_sizes_are_read_from_headers_annotations_and_packs(tmp_path: Path) -> None:
    sizes = write_images(tmp_path)
    assert [read_size(tmp_path / "images" / f"{number}.jpg") for number in range(4)] == sizes
    masks = ImageMask(tmp_path, classes=["a", "b"])
    assert masks.image_sizes().tolist() == [list(size) for size in sizes]
    assert masks.image_sizes().tolist() == [list(masks.read(index)["mask"].shape) for index in range(4)]
    Image.new("RGB", (64, 8)).save(tmp_path / "images" / "0.jpg")
    assert masks.image_sizes()[0].tolist() == [8, 64]
    Image.new("L", (64, 8)).save(tmp_path / "masks" / "0.png")
    write_pack(masks, tmp_path / "pack", size=None)
    assert PackedSamples(tmp_path / "pack").image_sizes().tolist() == [[8, 64], *(list(size) for size in sizes[1:])]
    images = [{"id": 9 - number, "file_name": f"{number}.jpg", "height": 7 + number, "width": 5} for number in range(4)]
    content = {"images": images, "categories": [{"id": 1, "name": "a"}], "annotations": []}
    (tmp_path / "found.json").write_text(json.dumps(content))
    coco = Coco(tmp_path, "found.json", split="b", split_shares={"a": 0.5, "b": 0.5})
    assert coco.image_sizes().tolist() == [[coco_height(coco.path(index)), 5] for index in range(2)]


def coco_height(path: Path) -> int:
    return 7 + int(path.stem)
