"""Convert the JSON configuration of PytorchTrainAcceleration (an image classifier fed by DALI) to a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.convert.foreign_config import ForeignConfig, Text, make_section, run_name
from paceline.core.arguments import Count, NonNegative, PartialShare, Positive
from paceline.core.registry import register
from paceline.recipe.schema import BatchSize, Epochs, Workers

_NORMALIZE = {"name": "normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_MODELS = {"mobilenet_v2": "torchvision/mobilenet_v2", "shufflenet_v2": "torchvision/shufflenet_v2_x1_0"}
_WITHOUT_DECAY = ("Adam", "Adadelta")
_DROPPED = {
    "dataset.transform.mean": "not needed: the pipeline never read it; it normalizes by ImageNet's mean",
    "dataset.label_file": "not needed: class names are sorted, and the split is drawn by `split_seed`",
    "dataset.txt_root": "not needed: no lists are written",
    "model.model_file.checkpoint": "not converted: start with `paceline train RECIPE --from CHECKPOINT`",
    "train.output": "not needed: `paceline export` writes the trained model",
    "saver.output_root": "not needed: `paceline export` writes the trained model",
    "logger.root": "not needed: a run writes everything to runs/NAME",
    "saver.cp_root": "not needed: a run writes everything to runs/NAME",
}
Switch = bool | Annotated[int, Field(ge=0, le=1)]


Dali = make_section(
    {
        "task": (Literal["classification"], "classification"),
        "device.use_amp": (Switch | None, None),
        "dataset.name": (str, "images"),
        "dataset.num_classes": (Count | None, None),
        "dataset.root": (Text, ...),
        "dataset.train_perc": (Annotated[float, Field(gt=0, lt=1)], 0.9),
        "dataset.loader.batch_size": (BatchSize, ...),
        "dataset.loader.num_workers": (Workers | None, None),
        "dataset.transform.image_size": (Count, 224),
        "dataset.transform.max_rotate_angle": (Annotated[float, Field(ge=0, le=180)] | None, None),
        "model.name": (str, ...),
        "model.model_file.pretrain": (str | None, None),
        "model.model_file.exclude": (str | list[str] | None, None),
        "model.freeze_branch": (str | None, None),
        "optimizer.name": (Literal["SGD", "Adam", "RMSprop", "Adadelta"], ...),
        "optimizer.lr": (Positive, ...),
        "optimizer.lr_gamma": (Positive, 1.0),
        "optimizer.lr_step": (Positive, 1),
        "optimizer.lr_min": (NonNegative | None, None),
        "optimizer.momentum": (PartialShare, 0.0),
        "optimizer.weight_decay": (NonNegative, 0.0),
        "train.epoch": (Epochs, ...),
        "train.eval_interval": (Count | None, None),
        "train.eval_only": (Switch | None, None),
        "saver.max_keep": (Count | None, None),
        "saver.save_interval": (Count | None, None),
    }
)


def is_dali_config(tree: dict[str, Any]) -> bool:
    """Whether a file has the sections of this program."""
    return {"dataset", "model", "optimizer", "train"} <= tree.keys()


def convert_dali_config(config: ForeignConfig) -> dict[str, Any]:
    """The recipe of a configuration, in the order of the schema."""
    model, epochs = config.take("model.name"), config.take("train.epoch")
    recipe = {
        "name": run_name(f"{model}_{config.take('dataset.name')}".lower()),
        "task": {"name": config.take("task")},
        "model": _model(config, model),
        "data": _data(config),
        "losses": [{"name": "cross_entropy"}],
        "optimizer": _optimizer(config),
        "schedule": _schedule(config, epochs),
        "train": {"epochs": epochs} | ({"precision": "fp16"} if config.take("device.use_amp") else {}),
        "evaluate": config.some(every_epochs="train.eval_interval"),
        "checkpoint": config.some(every_epochs="saver.save_interval", keep_last="saver.max_keep"),
    }
    if config.take("train.eval_only"):
        config.remark("train.eval_only", "not converted: run `paceline eval` instead of `paceline train`")
    for key, reason in _DROPPED.items():
        config.drop(reason, key)
    config.take("model.model_file")
    return {key: value for key, value in recipe.items() if value}


def _model(config: ForeignConfig, name: str) -> dict[str, Any]:
    model = {"name": _MODELS.get(name, f"timm/{name}")} | config.some(num_classes="dataset.num_classes")
    if name not in _MODELS:
        if register.kind("model").find(model["name"]) is None:
            raise config.error("model.name", f"expected {', '.join(_MODELS)} or a model of timm, got {name}")
        config.remark("model.name", "changed: taken as the name of a timm model")
    exclude = config.take("model.model_file.exclude") or []
    if file := config.take("model.model_file.pretrain"):
        excluded = [f"{each}.*" for each in ([exclude] if isinstance(exclude, str) else exclude)]
        model["weights"] = {"file": file} | ({"exclude": excluded} if excluded else {})
    written = (config.take("model.freeze_branch") or "").split(",")
    branches = [branch.strip() for branch in written if branch.strip()]
    if any(branch != branch.strip() or "." in branch for branch in written):
        theirs = "changed: that program compares what is before the first dot of a name, whitespace included"
        config.remark("model.freeze_branch", f"{theirs}; here {' and '.join(branches)} will be frozen")
    return model | ({"freeze": branches} if branches else {})


def _data(config: ForeignConfig) -> dict[str, Any]:
    size, share = config.take("dataset.transform.image_size"), config.take("dataset.train_perc")
    angle = config.take("dataset.transform.max_rotate_angle")
    split = {
        "dataset": "image_folder",
        "root": config.take("dataset.root"),
        "split_shares": {"train": share, "val": round(1 - share, 6)},
    }
    augmented = [
        {"name": "random_resized_crop", "size": size, "scale": [0.3, 1.0], "ratio": [0.8, 1.25]},
        *([{"name": "random_rotation", "degrees": angle, "fill": 127}] if angle else []),
        {"name": "random_horizontal_flip"},
        _NORMALIZE,
    ]
    plain = [{"name": "resize", "size": int(1.15 * size)}, {"name": "center_crop", "size": size}, _NORMALIZE]
    per_gpu = "changed: there per GPU, here over all processes; multiply it by the number of GPUs that you used"
    config.remark("dataset.loader.batch_size", per_gpu)
    return {
        "batch_size": config.take("dataset.loader.batch_size"),
        "loader": "dali",
        **config.some(num_workers="dataset.loader.num_workers"),
        "train": {**split, "split": "train", "transforms": augmented},
        "val": {**split, "split": "val", "transforms": plain},
    }


def _optimizer(config: ForeignConfig) -> dict[str, Any]:
    name = config.take("optimizer.name")
    optimizer = {"name": name.lower(), "lr": config.take("optimizer.lr")}
    if name in _WITHOUT_DECAY:
        reason = f"not converted: that program does not pass it to {name}"
        config.drop(reason, "optimizer.momentum", "optimizer.weight_decay")
        return optimizer
    return {key: config.take(f"optimizer.{key}") for key in ("momentum", "weight_decay")} | optimizer


def _schedule(config: ForeignConfig, epochs: int) -> dict[str, Any]:
    gamma = config.take("optimizer.lr_gamma")
    every, floor = config.take("optimizer.lr_step"), config.some(floor_lr="optimizer.lr_min")
    if floor.get("floor_lr", 0) > config.take("optimizer.lr"):
        raise config.error("optimizer.lr_min", "expected at most optimizer.lr")
    if every >= epochs:
        config.remark("optimizer.lr_step", f"not converted: the run ends after {epochs} epochs, before the first step")
        return {"decay": "constant"}
    config.remark("optimizer.lr_gamma", "changed: there the learning rate never fell; here it does, as written")
    return {"decay": "step", "gamma": gamma, "every_epochs": every} | floor
