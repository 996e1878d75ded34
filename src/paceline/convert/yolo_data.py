"""Convert the YAML file of a YOLO data set, as Ultralytics' programs read it, to a recipe for that data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.convert.foreign_config import ForeignConfig, Text, make_section, run_name

_BACKBONE = "torchvision/mobilenet_v2"
_NORMALIZE = {"name": "normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_JITTER = {"name": "color_jitter", "brightness": 0.4, "saturation": 0.7, "hue": 0.015}
_FLIP = {"name": "random_horizontal_flip"}
_SIDE = 640
_USUAL = ("data", "dataset")  # file names that tell nothing
_SPLITS = ("train", "val", "test")
_READ = ("names", "nc", "flip_idx", "kpt_names")  # by the data set itself
Entry = Text | list[Text]

YoloData = make_section(
    {
        "path": (str | None, None),
        "train": (Entry, ...),
        "val": (Entry, ...),
        "test": (Entry | None, None),
        "names": (list[Any] | dict[Any, Any] | None, None),
        "nc": (int | None, None),
        "kpt_shape": (list[int] | None, None),
    }
)


def is_yolo_data(tree: dict[str, Any]) -> bool:
    """Whether a file names classes and splits."""
    return {"train", "val"} <= tree.keys() and bool({"names", "nc"} & tree.keys())


def convert_yolo_data(config: ForeignConfig) -> dict[str, Any]:
    """A recipe that detects these objects, or finds their keypoints if the file has a `kpt_shape`."""
    file, shape = Path(config.source), config.take("kpt_shape")
    splits = [split for split in _SPLITS if config.take(split)]
    for key in _READ:
        config.take(key)
    config.drop("not needed: `dataset: yolo` reads what is there", "download")
    is_pose = bool(shape and any(shape))
    place = _place(config, file)
    transforms = _pose_transforms() if is_pose else _box_transforms()
    if is_pose:
        config.remark("kpt_shape", "finds the keypoints inside the boxes of the labels; it does not find the boxes")
    recipe = {
        "name": run_name(file.resolve().parent.name if file.stem in _USUAL else file.stem),
        "task": {"name": "keypoints" if is_pose else "detection"},
        "model": {
            "name": "simple_baseline" if is_pose else "fcos",
            "backbone": _BACKBONE,
            "weights": {"file": _BACKBONE, "into": "backbone"},
        },
        "data": {"batch_size": 16}
        | {
            split: {"dataset": "yolo", **place, "split": split}
            | ({"keypoints": True, "per_object": True} if is_pose else {})
            | {"transforms": transforms[split != "train"]}
            for split in splits
        },
        "losses": [{"name": "heatmap_mse", "sigma": 2.0}] if is_pose else None,
        "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
        "schedule": {"decay": "cosine", "warmup": "linear", "warmup_epochs": 3},
        "train": {"epochs": 100, "clip_grad_norm": 10},
        "evaluate": {"every_epochs": 5},
    }
    return {key: value for key, value in recipe.items() if value}


def _place(config: ForeignConfig, file: Path) -> dict[str, str]:
    """Where the file is, and the folder of its data if that is not its own."""
    path = config.take("path")
    if not path or os.path.normpath(file.parent / path) == os.path.normpath(file.parent):
        return {"file": str(file)}
    folder = file.parent / path
    if not folder.is_dir():
        config.remark("path", "not found from here: give the folder of the data as `root` beside each `file`")
        return {"file": str(file)}
    if folder.resolve().is_relative_to(file.parent.resolve()):
        return {"file": str(file)}
    return {"file": str(file.absolute()), "root": os.path.normpath(folder)}


def _box_transforms() -> tuple[list[Any], list[Any]]:
    """Those for training and for evaluation: the longer side becomes 640, and the rest is padded."""
    square = [{"name": "resize", "size": None, "max_size": _SIDE}, {"name": "pad", "size": _SIDE, "fill": 114}]
    moved = {"name": "random_affine", "translate": [0.1, 0.1], "scale": [0.5, 1.5], "fill": 114}
    return [*square, moved, _JITTER, _FLIP, _NORMALIZE], [*square, _NORMALIZE]


def _pose_transforms() -> tuple[list[Any], list[Any]]:
    crop = {"name": "pose_crop", "size": [256, 256]}
    return [crop | {"scale": [0.75, 1.25], "degrees": 30}, _JITTER, _FLIP, _NORMALIZE], [crop, _NORMALIZE]
