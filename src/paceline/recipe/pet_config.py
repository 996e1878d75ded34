"""Convert a YAML configuration of Pet, a PyTorch detection toolbox, to a recipe: the solver whole, the rest by name."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from paceline.recipe.dali_config import NORMALIZE
from paceline.recipe.foreign_config import ForeignConfig

_DECAYS = {"STEP": "multi_step", "COSINE": "cosine", "POLY": "poly", "STEP_COSINE": "step_cosine"}
_PET_GROUPS = (True, False, 0)
"""The settings of biases and of group norm that the preset `pet` holds."""


def is_pet_config(tree: dict[str, Any]) -> bool:
    """Whether a file has Pet's solver section."""
    return isinstance(tree.get("SOLVER"), dict)


def convert_pet_config(config: ForeignConfig) -> dict[str, Any]:
    """The recipe of a configuration, in the order of the schema."""
    task, model, size = _network(config)
    is_detection = task == "detection"
    recipe = {
        "name": PurePosixPath(str(config.take("CKPT", "pet"))).name,
        "task": task,
        "model": model | _weights(config, task),
        "data": _data(config, task, size),
        "losses": [{"name": "heatmap_mse"}] if task == "keypoints" else [{"name": "cross_entropy"}],
        "optimizer": _optimizer(config),
        "schedule": _schedule(config),
        "train": _length(config) | _precision(config),
        "checkpoint": _interval(config, "SOLVER.SNAPSHOT_ITERS", "SOLVER.SNAPSHOT_EPOCHS"),
        "logging": {"lr_change_ratio": config.number("SOLVER.LOG_LR_CHANGE_THRESHOLD", 1.1)},
    }
    if is_detection:
        del recipe["losses"]  # the model brings them
    return recipe


def _network(config: ForeignConfig) -> tuple[str, dict[str, Any], list[int]]:
    """The task, the nearest network of ours and its image size."""
    body = str(config.take("BACKBONE.CONV_BODY", "resnet"))
    config.remark("BACKBONE.CONV_BODY", "changed: the nearest network of torchvision is named; compare it with yours")
    config.drop("not needed: the number of classes is read from the data", "MODEL.NUM_CLASSES")
    if config.take("MODEL.RETINANET_ON"):
        return "detection", {"name": "torchvision/detection/retinanet_resnet50_fpn"}, [800, 1333]
    if config.take("MODEL.FASTER_ON") or config.take("MODEL.RPN_ON"):
        return "detection", {"name": "torchvision/detection/fasterrcnn_resnet50_fpn"}, [800, 1333]
    if "vgg" in body or config.take("MODEL.SSD_ON"):
        return "detection", {"name": "torchvision/detection/ssd300_vgg16"}, [300, 300]
    if "POSE" in config.tree or config.take("MODEL.KEYPOINT_ON"):
        return "keypoints", {"name": "simple_baseline", "backbone": "torchvision/resnet50"}, [256, 192]
    return "classification", {"name": "torchvision/resnet50"}, [224, 224]


def _weights(config: ForeignConfig, task: str) -> dict[str, Any]:
    is_rgb = config.take("MODEL.CONV1_RGB2BGR", True)  # turned to BGR when Pet reads them
    file = config.take("TRAIN.WEIGHTS")
    if task == "detection":
        config.remark("TRAIN.WEIGHTS", "not converted: torchvision names the tensors of its detectors differently")
        return {}
    weights = {"file": file, "channels": "rgb" if is_rgb else "bgr"}
    return {"weights": weights | ({"into": "backbone"} if task == "keypoints" else {})} if file else {}


def _data(config: ForeignConfig, task: str, size: list[int]) -> dict[str, Any]:
    if scales := [config.numbers(key) for key in ("TRAIN.SCALES", "TEST.SCALE") if config.take(key) is not None]:
        size = [int(scales[-1][-1]), *size[1:]] if task == "detection" and size[0] != 300 else size
        for key in ("TRAIN.SCALES", "TEST.SCALE"):
            config.remark(key, f"changed: all images of a batch have one size here, {size[0]} × {size[1]}")
    config.drop("not needed: images are resized to one height and width", "TRAIN.MAX_SIZE", "TEST.MAX_SIZE")
    first = {"name": "pose_crop" if task == "keypoints" else "resize", "size": size}
    plain = [first, _normalize(config)]
    return {
        "batch_size": config.assume("TRAIN.BATCH_SIZE", 16),
        "num_workers": config.number("DATA.LOADER_THREADS", config.number("TRAIN.LOADER_THREADS", 4)),
        "train": {
            **_dataset(config, "TRAIN.DATASETS", task),
            "transforms": [first, {"name": "random_horizontal_flip"}, *plain[1:]],
        },
        "val": {**_dataset(config, "TEST.DATASETS", task), "transforms": plain},
    }


def _normalize(config: ForeignConfig) -> dict[str, Any]:
    """Pet subtracts blue, green and red from 0 to 255; a recipe red, green and blue from 0 to 1."""
    mean, std = ([each / 255 for each in reversed(config.numbers(f"PIXEL_{key}"))] for key in ("MEANS", "STDS"))
    if not mean:
        return NORMALIZE
    return {"name": "normalize", "mean": [round(each, 6) for each in mean], "std": [round(each, 8) for each in std]}


def _dataset(config: ForeignConfig, key: str, task: str) -> dict[str, Any]:
    names = config.names(key) or ["images"]
    if len(names) > 1:
        config.remark(key, f"not converted: a split is one data set; {', '.join(names[1:])} left out")
    if task == "classification":
        config.remark(key, "changed: Pet's catalog names the folder; check root and split")
        return {"dataset": "image_folder", "root": f"data/{names[0]}"}
    kind = "person_keypoints" if task == "keypoints" else "instances"
    pose = {"keypoints": True, "per_object": True} if task == "keypoints" else {}
    if match := re.fullmatch(r"(?:keypoints_)?coco_(\d+)_(train|val)", names[0]):
        images = match[2] + match[1]
        return {
            "dataset": "coco",
            "root": "COCO",
            "annotations": f"annotations/{kind}_{images}.json",
            "images": images,
        } | pose
    config.remark(key, f"changed: Pet's catalog names the files of {names[0]}; give root, annotations and images")
    return {"dataset": "coco", "root": f"data/{names[0]}", "annotations": f"annotations/{names[0]}.json"} | pose


def _optimizer(config: ForeignConfig) -> dict[str, Any]:
    name = str(config.take("SOLVER.OPTIMIZER", "SGD")).lower()
    optimizer = {"name": name, "lr": config.number("SOLVER.BASE_LR", 0.001)}
    momentum, decay = config.number("SOLVER.MOMENTUM", 0.9), config.number("SOLVER.WEIGHT_DECAY", 5e-4)
    double, decays = config.take("SOLVER.BIAS_DOUBLE_LR", True), config.take("SOLVER.BIAS_WEIGHT_DECAY", False)
    group_norm = config.number("SOLVER.WEIGHT_DECAY_GN", 0)
    if name == "adam":
        for key in ("MOMENTUM", "WEIGHT_DECAY", "BIAS_DOUBLE_LR", "BIAS_WEIGHT_DECAY", "WEIGHT_DECAY_GN"):
            config.remark(f"SOLVER.{key}", "not converted: Pet does not pass it to Adam")
        return optimizer
    if (double, decays, group_norm) == _PET_GROUPS:
        groups: list[dict[str, Any]] = [{"preset": "pet"}]
    else:
        bias = {"kind": "bias", "lr_scale": 2 if double else 1} | ({} if decays else {"weight_decay": 0.0})
        groups = [bias, {"kind": "group_norm", "weight_decay": group_norm}]
    return {**optimizer, "momentum": momentum, "weight_decay": decay, "param_groups": groups}


def _schedule(config: ForeignConfig) -> dict[str, Any]:
    policy = str(config.take("SOLVER.LR_POLICY", "STEP"))
    gamma, power = config.number("SOLVER.GAMMA", 0.1), config.number("SOLVER.LR_POW", 0.9)
    steps = config.numbers("SOLVER.STEPS")
    schedule: dict[str, Any] = {"decay": _DECAYS.get(policy, policy.lower())}
    if policy == "POLY":
        schedule["power"] = power
    if policy in ("STEP", "STEP_COSINE"):
        unit = "epochs" if _counts_epochs(config) else "steps"
        schedule |= {"gamma": gamma, f"milestone_{unit}": steps} if steps else {"decay": "constant"}
    warmup = _interval(config, "SOLVER.WARM_UP_ITERS", "SOLVER.WARM_UP_EPOCHS", "warmup")
    if not any(warmup.values()):
        return schedule
    return {
        **schedule,
        "warmup": str(config.take("SOLVER.WARM_UP_METHOD", "LINEAR")).lower(),
        **warmup,
        "warmup_from": config.number("SOLVER.WARM_UP_FACTOR", 0.1),
        "count_from": 1,
    }


def _counts_epochs(config: ForeignConfig) -> bool:
    return config.take("SOLVER.MAX_ITER") is None and config.take("SOLVER.MAX_EPOCHS") is not None


def _length(config: ForeignConfig) -> dict[str, Any]:
    if _counts_epochs(config):
        return {"epochs": config.number("SOLVER.MAX_EPOCHS")}
    return {"steps": config.number("SOLVER.MAX_ITER", 90_000)}


def _interval(config: ForeignConfig, steps: str, epochs: str, what: str = "every") -> dict[str, Any]:
    if _counts_epochs(config):
        return {f"{what}_epochs": config.number(epochs, 5 if what == "warmup" else 1)}
    return {f"{what}_steps": config.number(steps, 500 if what == "warmup" else 10_000)}


def _precision(config: ForeignConfig) -> dict[str, Any]:
    level, keep = config.take("SOLVER.AMP.OPT_LEVEL", "O1"), config.take("SOLVER.AMP.KEEP_BN_FP32")
    scale = config.take("SOLVER.AMP.LOSS_SCALE")
    if not config.take("SOLVER.AMP.ENABLED"):
        return {}
    precision: dict[str, Any] = {"precision": level}
    if keep is not None and level in ("O2", "O3"):
        precision["keep_norms_fp32"] = keep
    return precision | ({} if scale is None else {"loss_scale": scale})
