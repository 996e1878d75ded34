"""Convert a YAML configuration of Pet, a PyTorch detection toolbox, to a recipe: the solver whole, the rest by name."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import Field

from paceline.convert.foreign_config import AsNumbers, ForeignConfig, Names, Numbers, make_section, run_name
from paceline.convert.pet_solver import SOLVER, convert_solver
from paceline.core.errors import RecipeError
from paceline.recipe.problems import join_or
from paceline.recipe.schema import BatchSize, Workers

_FASTER_RCNN = ("detection", "torchvision/detection/fasterrcnn_resnet50_fpn", [800, 1333])
_NETWORKS = {
    "RETINANET_ON": ("detection", "torchvision/detection/retinanet_resnet50_fpn", [800, 1333]),
    "FASTER_ON": _FASTER_RCNN,
    "RPN_ON": _FASTER_RCNN,
    "SSD_ON": ("detection", "torchvision/detection/ssd300_vgg16", [300, 300]),
    "KEYPOINT_ON": ("keypoints", "simple_baseline", [256, 192]),
    "CLS_ON": ("classification", "torchvision/resnet50", [224, 224]),
}
"""The task of a key of MODEL, the nearest network and its height and width."""
_BY_NAME = (
    ("keypoints|pose", "KEYPOINT_ON"),
    ("seg|mask|pars", ""),
    ("ssd", "SSD_ON"),
    ("imagenet|cifar|cls", "CLS_ON"),
)
"""What the names of data sets and checkpoints tell of the task, the first that fits; Pet has a tool for each task."""
_LOSSES = {"keypoints": "heatmap_mse", "classification": "cross_entropy"}
_SEGMENTATION = "start from a recipe such as `camvid`; SOLVER, converted alone, gives its optimizer, schedule and train"
_WITHOUT = {
    "MASK_ON": "instance segmentation (Mask R-CNN)",
    "CASCADE_ON": "Cascade R-CNN",
    "PARSING_ON": "human parsing",
    "UV_ON": "DensePose",
}
"""What Paceline has none of, by its key of MODEL."""
_THREE = Field(min_length=3, max_length=3)


Pet = make_section(
    SOLVER
    | {
        "CKPT": (str, "pet"),
        # Blue, green and red, from 0 to 255.
        "PIXEL_MEANS": (Annotated[Numbers, _THREE], [102.9801, 115.9465, 122.7717]),
        "PIXEL_STDS": (Annotated[list[Annotated[float, Field(ge=0.01)]], _THREE, AsNumbers], [1.0, 1.0, 1.0]),
        "BACKBONE.CONV_BODY": (str, "resnet"),
        "MODEL": (dict[str, Any], {}),
        "TRAIN.BATCH_SIZE": (BatchSize, 16),
        "TRAIN.DATASETS": (Names, ["images"]),
        "TRAIN.LOADER_THREADS": (Workers | None, None),
        "TRAIN.USE_FLIPPED": (bool | None, None),
        "TRAIN.WEIGHTS": (str | None, None),
        "TEST.DATASETS": (Names, []),
    },
    closed=["SOLVER", "AMP"],
)


def is_pet_config(tree: dict[str, Any]) -> bool:
    """Whether a file has Pet's solver section."""
    return "SOLVER" in tree


def convert_pet_config(config: ForeignConfig) -> dict[str, Any]:
    """The recipe of a configuration, in the order of the schema."""
    task, network, size = _network(config)
    backbone = {"backbone": "torchvision/resnet50"} if task == "keypoints" else {}
    recipe = {
        "name": run_name(PurePosixPath(config.take("CKPT")).name),
        "task": {"name": task},
        "model": {"name": network} | backbone | _weights(config, task),
        "data": _data(config, task, size),
        "losses": [{"name": _LOSSES[task]}] if task in _LOSSES else None,  # the model brings those of detection
    } | convert_solver(config, task == "keypoints")
    return {key: value for key, value in recipe.items() if value}


def _network(config: ForeignConfig) -> tuple[str, str, list[int]]:
    """The task, the nearest network and its height and width; refuses what is not here."""
    on = [key for key in config.tree.get("MODEL", {}) if key.endswith("_ON") and config.take(f"MODEL.{key}")]
    if problems := [_refusal(config, key) for key in on if key not in {*_NETWORKS, "FPN_ON"}]:
        raise RecipeError(problems)
    body = config.take("BACKBONE.CONV_BODY")
    keys = [key for key in _NETWORKS if key in on] or [_key_by_name(config, body)]
    if "KEYPOINT_ON" in keys[1:]:
        raise RecipeError(_refusal(config, "KEYPOINT_ON", "Keypoint R-CNN"))
    config.drop("not needed: the number of classes is read from the data", "MODEL.NUM_CLASSES")
    found = _NETWORKS[keys[0]]
    config.remark("BACKBONE.CONV_BODY", f"changed: {found[1]} stands in for {body}; name the network that you use")
    return found


def _refusal(config: ForeignConfig, key: str, missing: str | None = None) -> str:
    if key == "SEMSEG_ON":
        return str(config.error(f"MODEL.{key}", f"not converted: {_SEGMENTATION}"))
    missing = missing or _WITHOUT.get(key, "such head")
    return str(config.error(f"MODEL.{key}", f"Paceline has no {missing}; set this to False to convert the rest"))


def _key_by_name(config: ForeignConfig, body: str) -> str:
    names = " ".join([config.tree.get("CKPT") or "", *config.items("TRAIN.DATASETS")]).casefold()
    if "POSE" in config.tree:
        return "KEYPOINT_ON"
    key = next((key for word, key in _BY_NAME if re.search(word, names)), None)
    if key is None and "vgg" in body and re.search("coco|voc", names):
        return "SSD_ON"
    if key is None and config.tree.keys() <= {"SOLVER", "TRAIN", "TEST", "CKPT"} and not config.has("TRAIN.DATASETS"):
        config.remark("SOLVER", "converted alone: task, model and data are placeholders; give yours")
        return "CLS_ON"
    if not key:
        message = f"the file does not tell the task: set {join_or([*_NETWORKS])} to True"
        raise config.error("MODEL", f"{message}; for semantic segmentation, {_SEGMENTATION}")
    return key


def _weights(config: ForeignConfig, task: str) -> dict[str, Any]:
    if task == "detection":
        config.drop("not converted: torchvision names the tensors of its detectors differently", "TRAIN.WEIGHTS")
        return {}
    if not (file := config.take("TRAIN.WEIGHTS")):
        return {}
    is_bgr = config.take("MODEL.CONV1_RGB2BGR") is False  # else they are turned to BGR when Pet reads them
    into = {"into": "backbone"} if task == "keypoints" else {}
    return {"weights": {"file": file, "channels": "bgr" if is_bgr else "rgb"} | into}


def _data(config: ForeignConfig, task: str, size: list[int]) -> dict[str, Any]:
    size = _size(config, task, size)
    first = {"name": "pose_crop" if task == "keypoints" else "resize", "size": size}
    means, stds = ([each / 255 for each in reversed(config.items(key))] for key in ("PIXEL_MEANS", "PIXEL_STDS"))
    last = {"name": "normalize", "mean": [round(each, 6) for each in means], "std": [round(each, 8) for each in stds]}
    flip = [] if config.take("TRAIN.USE_FLIPPED") is False else [{"name": "random_horizontal_flip"}]
    transforms: list[dict[str, Any]] = [first, *flip, last]
    names = ", ".join(each["name"] for each in transforms)
    config.drop(f"not converted: the recipe has {names}; change them there if this asks for others", "TRAIN.AUG")
    threads = "DATA.LOADER_THREADS" if config.has("DATA.LOADER_THREADS") else "TRAIN.LOADER_THREADS"
    data = {
        "batch_size": config.take("TRAIN.BATCH_SIZE"),
        **config.some(num_workers=threads),
        "train": _dataset(config, "TRAIN.DATASETS", task) | {"transforms": transforms},
    }
    if config.has("TEST.DATASETS"):
        data["val"] = _dataset(config, "TEST.DATASETS", task) | {"transforms": [first, last]}
    return data


def _size(config: ForeignConfig, task: str, size: list[int]) -> list[int]:
    """Height and width: those of the file, where it has them in the form of the task."""
    keys = ("TRAIN.SCALES", "TEST.SCALE")
    for key in keys:
        given = [each for each in config.items(key) if isinstance(each, int) and each > 0]
        if task == "keypoints" and len(given) > 1:
            size = [given[-1], given[-2]]
        elif task != "keypoints" and given and size != [300, 300]:
            size = [given[-1], given[-1] if task == "classification" else size[1]]
    for key in keys:
        config.remark(key, f"changed: all images of a batch have one size here, {size[0]} × {size[1]}")
    config.drop("not needed: images are resized to one height and width", "TRAIN.MAX_SIZE", "TEST.MAX_SIZE")
    return size


def _dataset(config: ForeignConfig, key: str, task: str) -> dict[str, Any]:
    if not (names := config.items(key)):
        raise config.error(key, "expected the name of a data set, got none")
    if len(names) > 1:
        config.remark(key, f"not converted: a split is one data set; {', '.join(names[1:])} left out")
    if task == "classification":
        config.remark(key, "changed: Pet's catalog names the folder; give root and split")
        return {"dataset": "image_folder", "root": names[0]}
    kind = "person_keypoints" if task == "keypoints" else "instances"
    pose = {"keypoints": True, "per_object": True} if task == "keypoints" else {}
    if match := re.fullmatch(r"(?:keypoints_)?coco_(\d+)_(train|val)", names[0]):
        images = match[2] + match[1]
        files = {"root": "COCO", "annotations": f"annotations/{kind}_{images}.json", "images": images}
    else:
        config.remark(key, f"changed: Pet's catalog names the files of {names[0]}; give root, annotations and images")
        files = {"root": names[0], "annotations": f"annotations/{names[0]}.json"}
    return {"dataset": "coco"} | files | pose
