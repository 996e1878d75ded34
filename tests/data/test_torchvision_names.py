"""Transforms have the names, arguments and defaults of torchvision.transforms.v2; what differs is listed here."""

import inspect
from typing import Any

import pytest
from support.registered import entry_of

from paceline.core.registry import register
from paceline.core.torchvision_ops import import_torchvision

import_torchvision()
from torchvision.transforms import v2  # noqa: E402

OURS_ONLY = {
    "fill": "also where torchvision fills with 0",
    "mask_fill": "what is put into masks; torchvision takes it from a mapping of types",
    "min_visible": "objects are removed in the same step; torchvision needs SanitizeBoundingBoxes",
    "p": "replaces RandomApply, which a recipe has not",
}
OURS_ONLY_OF = {
    ("pad", "size"): "MMDetection's: up to a size",
    ("pad", "size_divisor"): "MMDetection's: up to a multiple",
}
THEIRS_ONLY = {
    "interpolation": "bilinear, nearest for masks",
    "antialias": "always",
    "inplace": "never",
    "padding_mode": "constant",
    "pad_if_needed": "always",
    "expand": "the size stays",
    "center": "that of the image",
    "labels_getter": "labels are a field of the batch",
    "num_magnitude_bins": "magnitudes are continuous, from 0 to 30",
}
DEFAULTS = {
    **{("color_jitter", name): "0 is None" for name in ("brightness", "contrast", "saturation", "hue")},
    ("random_crop", "padding"): "0 is no padding",
    ("random_affine", "degrees"): "need not be given",
    ("random_affine", "translate"): "none of it",
    ("random_affine", "scale"): "none of it",
    ("random_affine", "shear"): "none of it",
    ("random_photometric_distort", "brightness"): "levels that are added, as in SSD's own code",
    ("random_iou_crop", "sampler_options"): "None stands for these",
    ("rand_augment", "fill"): "None is 0",
    ("pad", "padding"): "size or size_divisor may be given instead",
}
SUPPLIED = {"pairs", "num_classes"}  # known from the data set


NAMES = {entry.name for entry in register.kind("transform") if entry.resolve().__module__.startswith("paceline.")}
THEIRS = {name.lower(): kind for name, kind in vars(v2).items() if inspect.isclass(kind)}
SAME = sorted(name for name in NAMES if name.replace("_", "") in THEIRS)


def parameters(name: str) -> tuple[Any, Any]:
    """Ours and theirs, but for those that are known from the data set."""
    kinds = entry_of("transform", name).resolve(), THEIRS[name.replace("_", "")]
    ours, theirs = (dict(inspect.signature(kind).parameters) for kind in kinds)
    for known in SUPPLIED:
        ours.pop(known, None), theirs.pop(known, None)
    return ours, theirs


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_most_transforms_are_known_to_torchvision() -> None:
    assert len(SAME) >= 18
    assert NAMES - set(SAME) <= {
        "clip",
        "multi_clip",
        "multi_crop",
        "pose_crop",
        "multi_scale",
        "mixup_or_cutmix",
        "random_masking",
    }


@pytest.mark.parametrize("name", SAME)
def test_arguments_are_those_of_torchvision(name: str) -> None:
    ours, theirs = parameters(name)
    assert {each for each in ours.keys() - theirs.keys() if (name, each) not in OURS_ONLY_OF} <= OURS_ONLY.keys()
    assert theirs.keys() - ours.keys() <= THEIRS_ONLY.keys()


def test_defaults_are_those_of_torchvision() -> None:
    different = set()
    for name in SAME:
        ours, theirs = parameters(name)
        both = ours.keys() & theirs.keys()
        different |= {(name, each) for each in both if plain(ours[each].default) != plain(theirs[each].default)}
    assert different == DEFAULTS.keys()
