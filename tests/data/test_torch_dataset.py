"""Map-style data sets of torch: what they give becomes fields of samples, drawn the same whatever reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from paceline.core.errors import DataError, RecipeError
from paceline.data.batch import Batch
from paceline.data.datasets.torch_dataset import as_dataset
from paceline.data.loader import load
from paceline.data.split_loader import Request, SplitLoader
from paceline.data.transforms.geometric import RandomHorizontalFlip

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)  # [H, W, C]
FLOATS = PIXELS / np.float32(255)


class Given(Dataset[Any]):
    """Gives the same for every index."""

    def __init__(self, given: Any, classes: list[str] | None = None) -> None:
        self.given = given
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.given


def read(given: Any, classes: list[str] | None = None) -> dict[str, Any]:
    return as_dataset("mine", Given(given, classes)).read(0)


IMAGES: list[tuple[str, Any, Any]] = [
    ("PIL", Image.fromarray(PIXELS), PIXELS),
    ("PIL with alpha", Image.fromarray(PIXELS).convert("RGBA"), PIXELS),
    ("gray PIL", Image.fromarray(PIXELS[..., 0]), PIXELS[..., :1]),
    ("PIL of 16 bits", Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 1000), PIXELS[..., :1] * np.float32(1000)),
    ("tensor", torch.from_numpy(PIXELS).permute(2, 0, 1), PIXELS),
    ("tensor of halves", torch.from_numpy(PIXELS).permute(2, 0, 1).bfloat16(), PIXELS.astype(np.float32)),
    ("gray tensor", torch.from_numpy(PIXELS[..., 0]), PIXELS[..., :1]),
    ("tensor with channels last", torch.zeros(5, 6, 3, dtype=torch.uint8), np.zeros((5, 6, 3), np.uint8)),
    ("13 channels", torch.zeros(13, 5, 6), np.zeros((5, 6, 13), np.float32)),
    ("clip", torch.zeros(7, 3, 5, 6, dtype=torch.uint8), np.zeros((7, 5, 6, 3), np.uint8)),
    ("array", PIXELS, PIXELS),
    ("array with channels first", np.zeros((3, 5, 6), np.uint8), np.zeros((5, 6, 3), np.uint8)),
    ("array of float64", FLOATS.astype(np.float64), FLOATS),
    ("array of int64", PIXELS.astype(np.int64), PIXELS.astype(np.float32)),
]


@pytest.mark.parametrize(("given", "expected"), [case[1:] for case in IMAGES], ids=[case[0] for case in IMAGES])
def test_images_become_uint8_or_float32_with_channels_last(given: Any, expected: Any) -> None:
    for sample in (read((given, 1)), read({"image": given}), read(given)):
        image = sample["image"]
        assert (image.dtype, image.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(image, expected)
        assert image.flags.c_contiguous


DEPTH = np.linspace(0, 9, 8).reshape(2, 4)
TARGETS: list[tuple[str, Any, str, Any]] = [
    ("int", 3, "label", 3),
    ("bool", True, "label", 1),
    ("tensor of one int", torch.tensor(3), "label", 3),
    ("numpy int", np.uint16(3), "label", 3),
    ("float", 2.5, "target", np.float32(2.5)),
    ("tensor of one float", torch.tensor(2.5, dtype=torch.float64), "target", np.float32(2.5)),
    ("list", [1.0, 2.0, 3.0], "target", np.array([1, 2, 3], np.float32)),
    ("whole numbers", torch.tensor([1, 2, 3]), "target", np.array([1, 2, 3])),
    ("depth", DEPTH, "mask", DEPTH.astype(np.float32)),
    ("depth with a channel", torch.from_numpy(DEPTH)[None], "mask", DEPTH.astype(np.float32)),
    ("depth in millimeters", (DEPTH * 7000).astype(np.uint16), "mask", (DEPTH * 7000).astype(np.uint16)),
    ("PIL of floats", Image.fromarray(DEPTH.astype(np.float32)), "mask", DEPTH.astype(np.float32)),
    ("ids", torch.from_numpy(DEPTH).long(), "mask", DEPTH.astype(np.uint8)),
    ("ids with -1", torch.from_numpy(DEPTH).long() - 1, "mask", DEPTH.astype(np.int16) - 1),
    ("PIL mask", Image.fromarray(DEPTH.astype(np.uint8)), "mask", DEPTH.astype(np.uint8)),
    ("flow", torch.ones(2, 2, 4), "target", np.ones((2, 2, 4), np.float32)),
    ("other size", torch.ones(4, 2), "target", np.ones((4, 2), np.float32)),
]


@pytest.mark.parametrize(("given", "field", "value"), [case[1:] for case in TARGETS], ids=[case[0] for case in TARGETS])
def test_targets_become_the_field_that_they_are(given: Any, field: str, value: Any) -> None:
    sample = read((PIXELS, given))
    assert sample.keys() == {"image", field}
    assert np.array_equal(sample[field], value)
    assert type(sample[field]) is type(value) if isinstance(value, int) else sample[field].dtype.kind in "fiu"
    batch = SplitLoader(as_dataset("mine", Given((PIXELS, given))), [], seed=0).fetch(0, np.arange(3))
    assert batch.target.shape == (3, *np.shape(value))


def test_vectors_beside_classes_are_labels() -> None:
    sample = read((PIXELS, torch.tensor([True, False])), classes=["sunny", "windy"])
    assert sample["label"].tolist() == [1.0, 0.0]
    assert as_dataset("mine", Given(0, ["sunny", "windy"])).classes == ["sunny", "windy"]
    assert as_dataset("mine", Subset(Given(0, ["sunny", "windy"]), [0])).classes == ["sunny", "windy"]


def test_dicts_keep_their_names_and_lose_what_is_no_number() -> None:
    sample = read({"image": PIXELS, "depth": DEPTH, "age": 3.5, "file": "a.png", "note": None, "id": 7})
    assert sample.keys() == {"image", "depth", "age"}
    objects = {"boxes": torch.ones(2, 4), "labels": torch.tensor([1, 2]), "iscrowd": torch.tensor([0, 1])}
    sample = read((PIXELS, objects))
    assert sample.keys() == {"image", "boxes", "classes", "crowd", "area"}


def test_objects_are_completed() -> None:
    boxes = [[1, 2, 4, 6], [0, 0, 2, 1]]
    sample = read((PIXELS, {"boxes": torch.tensor(boxes), "labels": [2, 0]}))
    assert (sample["boxes"].dtype, sample["classes"].dtype) == (np.float32, np.int64)
    assert (sample["area"].tolist(), sample["crowd"].tolist()) == ([12, 2], [False, False])
    crowd = read((PIXELS, {"boxes": boxes, "labels": [2, 0], "iscrowd": [1, 0], "area": [5, 6]}))
    assert (crowd["crowd"].tolist(), crowd["area"].tolist()) == ([True, False], [5, 6])
    nothing = read((PIXELS, {"boxes": [], "labels": []}))
    assert {name: nothing[name].shape for name in ("boxes", "classes", "crowd", "area")} == {
        "boxes": (0, 4), "classes": (0,), "crowd": (0,), "area": (0,),
    }  # fmt: skip


def test_keypoints_have_names_and_a_box() -> None:
    given = Given((PIXELS, {"keypoints": torch.tensor([[1, 2, 2], [3, 1, 1], [9, 9, 0]])}))
    given.keypoint_names = ["left_eye", "right_eye", "nose"]  # type: ignore[attr-defined]
    dataset = as_dataset("mine", given)
    assert dataset.joints == (["left_eye", "right_eye", "nose"], [(0, 1)], [])  # type: ignore[attr-defined]
    sample = dataset.read(0)
    assert sample["keypoints"].shape == (1, 3, 3)
    assert sample["boxes"].tolist() == [[1, 1, 3, 2]], "of those that are labeled"
    assert as_dataset("mine", Given(PIXELS)).joints is None  # type: ignore[attr-defined]
    given.keypoint_names = ["nose"]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"3 keypoints, but `keypoint_names` has 1"):
        as_dataset("mine", given).read(0)


def test_labels_of_objects_are_classes() -> None:
    boxes = {"boxes": [[0, 0, 1, 1]], "labels": [2]}
    assert read((PIXELS, boxes), ["a", "b", "c"])["classes"].tolist() == [2]
    with pytest.raises(DataError, match="the label 2, expected 0 to 1"):
        read((PIXELS, boxes), ["a", "b"])


WRONG: list[tuple[Any, str]] = [
    ((PIXELS, 1, 2), "3 things"),
    ({"photo": PIXELS}, "photo"),
    ((PIXELS, "cat"), "target of type str"),
    ((PIXELS, None), "target of type NoneType"),
    (("cat.png", 1), "image of type str"),
    ((np.zeros(3), 1), r"float64 \[3\]"),
    ((PIXELS, {"keypoints": [[1, 2], [3, 4]]}), r"\[2, 2\], expected \[J, 3\]"),
    ((PIXELS, {"boxes": [[1, 2, 3, 4, 0.5]]}), r"\[1, 5\], expected \[K, 4\]"),
    ((PIXELS, {"boxes": [[9, 2, 3, 4]], "labels": [0]}), r"the box \[9.0, 2.0, 3.0, 4.0\], expected x1 y1 x2 y2"),
]


@pytest.mark.parametrize(("given", "found"), WRONG)
def test_what_cannot_be_a_sample_names_the_data_set_and_the_sample(given: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"data set mine: sample 0: .*{found}"):
        read(given)


def test_mistakes_in_a_data_set_name_their_line() -> None:
    class Broken(Given):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("lost")

    with pytest.raises(DataError, match=rf"data set mine: sample 2: .*{Path(__file__).name}:\d+: KeyError: 'lost'"):
        as_dataset("mine", Broken(0)).read(2)
    with pytest.raises(RecipeError, match="data set mine: its function gave nothing"):
        as_dataset("mine", None)
    with pytest.raises(RecipeError, match="has no method __len__"):
        as_dataset("mine", type("Unsized", (), {"__getitem__": print})())


def test_targets_of_different_shapes_are_named_by_sample() -> None:
    class Growing(Given):
        def __getitem__(self, index: int) -> Any:
            return PIXELS, np.ones(index + 1)

    with pytest.raises(DataError, match=r"samples 0 and 1 have target of shapes \[1\] and \[2\]"):
        SplitLoader(as_dataset("mine", Growing(0)), [], seed=0).fetch(0, np.arange(3))


def test_maps_move_with_the_image_and_other_targets_are_reported() -> None:
    ramp = np.tile(np.arange(4, dtype=np.float32), (2, 1))
    source = SplitLoader(as_dataset("mine", Given((PIXELS, ramp))), [RandomHorizontalFlip(p=1.0)], seed=0)
    batch = source.transform_batch(source.fetch(0, np.arange(2)), 0, torch.device("cpu"))
    assert torch.equal(batch.target, torch.from_numpy(ramp).flip(-1).expand(2, 2, 4))
    assert as_dataset("mine", Given((PIXELS, ramp))).notes == []  # type: ignore[attr-defined]
    (note,) = as_dataset("mine", Given((PIXELS, np.ones((2, 2, 4))))).notes  # type: ignore[attr-defined]
    assert "[2, 2, 4]" in note


class Random(Dataset[Any]):
    """Draws from all three generators, and with a pause, so that threads would get into each other's way."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        first = torch.rand(1, 3, 3)
        second = np.random.rand()
        return torch.cat([first, torch.rand(1, 3, 3)]), second + random.random()


def loaded(reader: Callable[[SplitLoader, list[Request]], list[Batch]]) -> list[Batch]:
    source = SplitLoader(as_dataset("random", Random()), [], seed=5)
    return reader(source, [Request(epoch, np.arange(k, k + 4)) for epoch in (0, 1) for k in (0, 4, 8)])


def test_what_is_drawn_follows_from_seed_epoch_and_sample_whatever_reads() -> None:
    def by_threads(source: SplitLoader, requests: list[Request]) -> list[Batch]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda request: source.fetch(*request), requests))

    alone = loaded(lambda source, requests: list(load(source, requests, 0)))
    others = [
        loaded(lambda source, requests: list(load(source, requests, 2, "process"))),
        loaded(lambda source, requests: list(load(source, requests, 2, "thread"))),
        loaded(lambda source, requests: list(load(source, requests, None, "auto"))),
        loaded(by_threads),
        loaded(lambda source, requests: [source.fetch(*each) for each in reversed(requests)][::-1]),
    ]
    for other in others:
        assert all(torch.equal(one["image"], two["image"]) for one, two in zip(alone, other, strict=True))
        assert all(torch.equal(one.target, two.target) for one, two in zip(alone, other, strict=True))
    images = torch.cat([batch["image"] for batch in alone]).flatten(1)
    assert len({tuple(image.tolist()) for image in images}) == 24, "all samples of all epochs are drawn again"


def test_threads_never_read_beside_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dropout draws from the generator that a data set's transforms draw from."""
    import paceline.data.loader as autotune

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("threads read")

    monkeypatch.setattr(autotune, "map_in_order", refuse)
    for kind in ("auto", "thread"):
        assert len(loaded(lambda source, requests, kind=kind: list(load(source, requests, 1, kind)))) == 6  # type: ignore[misc]


def test_data_sets_of_torch_itself() -> None:
    pairs = as_dataset("pairs", TensorDataset(torch.rand(4, 3, 5, 5), torch.rand(4, 2)))
    assert (len(pairs), pairs.channels, pairs.classes) == (4, 3, [])
    assert pairs.read(1)["target"].shape == (2,)
