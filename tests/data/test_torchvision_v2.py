"""torchvision's v2 transforms beside ours: the same pixels as torchvision's own, drawn the same whatever reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.registered import arguments_of, entry_of

from paceline.core.errors import DataError, RecipeError
from paceline.core.registry import register
from paceline.core.torchvision_ops import import_torchvision
from paceline.data.batch import Sample
from paceline.data.loader import load
from paceline.data.split_loader import Request, SplitLoader
from paceline.data.transforms.torchvision_v2 import (
    LEFT_OUT,
    TorchvisionTransform,
    as_transform,
    v2_classes,
    v2_signatures,
)

import_torchvision()
from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

GENERATOR = np.random.default_rng(0)
IMAGE = GENERATOR.integers(0, 256, (20, 30, 3), dtype=np.uint8)
MASK = GENERATOR.integers(0, 5, (20, 30), dtype=np.uint8)
DEPTH = GENERATOR.random((20, 30), dtype=np.float32)
DRAW = np.array([0.37])
SEED = int(0.37 * 2**53)


def named(name: str, **arguments: Any) -> Any:
    """As a recipe makes it."""
    checked = arguments_of("transform", f"torchvision/{name}").model_validate(arguments)
    return entry_of("transform", f"torchvision/{name}").resolve()(**dict(checked))


def test_names_are_those_of_torchvision_but_for_what_a_recipe_cannot_give() -> None:
    names = {name.removeprefix("torchvision/") for name in register.kind("transform").names() if "/" in name}
    assert names == set(v2_signatures())
    assert len(names) > 30
    assert {kind.__name__ for name, kind in v2_classes().items() if name not in names} == set(LEFT_OUT)
    assert {"gaussian_blur", "random_iou_crop", "jpeg", "aug_mix"} <= names


REQUIRED: dict[str, dict[str, Any]] = {
    "center_crop": {"size": 8}, "gaussian_blur": {"kernel_size": [3, 5]}, "pad": {"padding": 2},
    "random_adjust_sharpness": {"sharpness_factor": 2}, "random_affine": {"degrees": 10}, "random_crop": {"size": 9},
    "random_posterize": {"bits": 3}, "random_resize": {"min_size": 8, "max_size": 12},
    "random_resized_crop": {"size": [8, 10]}, "random_rotation": {"degrees": [-20, 20]},
    "random_shortest_size": {"min_size": 12}, "random_solarize": {"threshold": 128}, "resize": {"size": 12},
    "elastic_transform": {"sigma": 1.0}, "scale_jitter": {"target_size": [16, 16]}, "jpeg": {"quality": 50},
}  # fmt: skip
NOT_FOR_IMAGES = {
    "random_iou_crop": "needs boxes",
    "uniform_temporal_subsample": "needs a clip",
    "jpeg": "needs operators that a CPU build of torch has not",
}
WITHOUT_MASKS = {"aug_mix", "auto_augment", "rand_augment", "trivial_augment_wide"}


@pytest.mark.parametrize("name", sorted(set(v2_signatures()) - set(NOT_FOR_IMAGES)))
def test_each_gives_the_pixels_that_torchvision_gives(name: str) -> None:
    sample = {"image": IMAGE} if name in WITHOUT_MASKS else {"image": IMAGE, "mask": MASK}
    found = named(name, **REQUIRED.get(name, {}))(sample, DRAW)
    transform = v2_classes()[name](**REQUIRED.get(name, {}))
    image = tv_tensors.Image(torch.from_numpy(IMAGE).permute(2, 0, 1).contiguous())
    torch.manual_seed(SEED)
    changed = transform(image, *([tv_tensors.Mask(torch.from_numpy(MASK))] if "mask" in sample else []))
    image, *masks = changed if isinstance(changed, tuple) else (changed,)
    assert np.array_equal(found["image"], image.permute(1, 2, 0).numpy())
    assert all(np.array_equal(found["mask"], mask.numpy()) for mask in masks)


def test_float_maps_move_with_the_image() -> None:
    found = named("random_vertical_flip", p=1.0)({"image": IMAGE, "mask": DEPTH, "label": 3}, DRAW)
    assert np.array_equal(found["mask"], DEPTH[::-1])
    assert np.array_equal(found["image"], IMAGE[::-1])
    assert (found["label"], found["mask"].dtype) == (3, np.float32)
    turned = named("random_rotation", degrees=[90, 90])({"image": IMAGE[:, :20], "mask": DEPTH[:, :20]}, DRAW)
    assert np.array_equal(turned["mask"], np.rot90(DEPTH[:, :20]))


def test_boxes_and_masks_of_objects_move_too() -> None:
    sample: Sample = {"image": IMAGE, "boxes": np.array([[2, 3, 10, 9]], np.float32), "masks": MASK[None] % 2}
    found = named("random_horizontal_flip", p=1.0)(sample, DRAW)
    assert found["boxes"].tolist() == [[20, 3, 28, 9]]
    assert np.array_equal(found["masks"], sample["masks"][..., ::-1])


def test_clips_are_videos() -> None:
    clip = GENERATOR.integers(0, 256, (6, 8, 10, 3), dtype=np.uint8)
    found = named("random_horizontal_flip", p=1.0)({"image": clip}, DRAW)["image"]
    assert np.array_equal(found, clip[:, :, ::-1])
    assert named("uniform_temporal_subsample", num_samples=3)({"image": clip}, DRAW)["image"].shape == (3, 8, 10, 3)


def test_the_given_sample_stays_as_it_is() -> None:
    image = IMAGE.copy()
    image.flags.writeable = False
    TorchvisionTransform("zero", lambda source_image: source_image.zero_())({"image": image}, DRAW)
    assert np.array_equal(image, IMAGE)


def test_any_callable_is_given_the_image() -> None:
    composed: Any = as_transform("mine", v2.Compose([v2.RandomHorizontalFlip(1.0), v2.RandomVerticalFlip(1.0)]))
    sample = composed({"image": IMAGE, "mask": MASK}, DRAW)
    assert np.array_equal(sample["mask"], MASK[::-1, ::-1])
    brighter: Any = as_transform("brighter", lambda image: image + 1)
    assert np.array_equal(brighter({"image": IMAGE, "mask": MASK}, DRAW)["image"], IMAGE + np.uint8(1))
    images: Any = as_transform("images", v2.ToPILImage())
    assert np.array_equal(images({"image": IMAGE}, DRAW)["image"], IMAGE)


class Images:
    """Twelve images with depth."""

    classes: list[str] = []
    channels = 3

    def __len__(self) -> int:
        return 12

    def read(self, index: int) -> Sample:
        return {"image": np.roll(IMAGE, index, 0), "mask": np.roll(DEPTH, index, 0)}


def test_ours_and_theirs_in_one_list_are_the_same_whatever_reads() -> None:
    theirs = [named("random_resized_crop", size=[12, 16]), as_transform("noise", v2.RandomChannelPermutation())]
    ours = entry_of("transform", "random_horizontal_flip").resolve()(p=0.5)

    def batches(workers: int, kind: Any) -> list[Any]:
        source = SplitLoader(Images(), [theirs[0], ours, theirs[1]], seed=3)
        assert source.uses_global_rng
        requests = [Request(epoch, np.arange(k, k + 4)) for epoch in (0, 1) for k in (0, 4, 8)]
        return list(load(source, requests, workers, kind))

    alone = batches(0, "auto")
    for other in (batches(2, "process"), batches(1, "thread")):
        assert all(torch.equal(one["image"], two["image"]) for one, two in zip(alone, other, strict=True))
        assert all(torch.equal(one["mask"], two["mask"]) for one, two in zip(alone, other, strict=True))
    masks = torch.cat([batch["mask"] for batch in alone]).flatten(1)
    assert len({tuple(mask.tolist()) for mask in masks}) == 24


def test_what_other_fields_would_not_follow_is_refused() -> None:
    flip, crop = named("random_horizontal_flip", p=1.0), named("center_crop", size=4)
    keypoints: Sample = {"image": IMAGE, "keypoints": np.ones((1, 2, 3), np.float32)}
    with pytest.raises(DataError, match="torchvision/random_horizontal_flip: moves keypoints"):
        flip(keypoints, DRAW)
    kept = named("gaussian_blur", kernel_size=3)(keypoints, DRAW)
    assert np.array_equal(kept["keypoints"], keypoints["keypoints"])
    with pytest.raises(DataError, match="torchvision/center_crop: changes the size"):
        crop({"image": IMAGE, "mask": MASK, "truth": MASK, "matrix": np.eye(2, 3, dtype=np.float32)}, DRAW)
    with pytest.raises(RecipeError, match="transform mine: its function gave nothing"):
        as_transform("mine", None)
    with pytest.raises(DataError, match=r"transform mine: .*test_torchvision_v2\.py:\d+: ZeroDivisionError"):
        TorchvisionTransform("mine", lambda image: image / (1 // 0))({"image": IMAGE}, DRAW)
