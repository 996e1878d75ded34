"""Convert the JSON configuration of PytorchTrainAcceleration (an image classifier fed by DALI) to a recipe."""

from __future__ import annotations

from typing import Any

from paceline.recipe.foreign_config import ForeignConfig

NORMALIZE = {"name": "normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_MODELS = {"mobilenet_v2": "torchvision/mobilenet_v2", "shufflenet_v2": "torchvision/shufflenet_v2_x1_0"}
_WITHOUT_DECAY = ("Adam", "Adadelta")


def is_dali_config(tree: dict[str, Any]) -> bool:
    """Whether a file has the sections of this program."""
    return {"dataset", "model", "optimizer", "train"} <= tree.keys() and "loader" in (tree["dataset"] or ())


def convert_dali_config(config: ForeignConfig) -> dict[str, Any]:
    """The recipe of a configuration, in the order of the schema."""
    model, dataset = str(config.take("model.name")), str(config.take("dataset.name", "images"))
    recipe = {
        "name": f"{model}_{dataset}".lower(),
        "task": config.take("task", "classification"),
        "model": _model(config, model),
        "data": _data(config),
        "losses": [{"name": "cross_entropy"}],
        "optimizer": _optimizer(config),
        "schedule": {
            "decay": "step",
            "gamma": config.number("optimizer.lr_gamma", 1.0),
            "every_epochs": config.number("optimizer.lr_step", 1),
            "floor_lr": config.number("optimizer.lr_min", 0.0),
        },
        "train": {"epochs": config.number("train.epoch")},
        "evaluate": {"every_epochs": config.number("train.eval_interval", 1)},
        "checkpoint": {
            "every_epochs": config.number("saver.save_interval", 1),
            "keep_last": config.number("saver.max_keep", 10),
        },
    }
    if config.take("device.use_amp"):
        recipe["train"]["precision"] = "fp16"
    config.remark("optimizer.lr_gamma", "changed: there the learning rate never fell; here it does, as written")
    if config.take("train.eval_only"):
        config.remark("train.eval_only", "not converted: run `paceline eval` instead of `paceline train`")
    config.drop("not needed: `paceline export` writes the trained model", "train.output", "saver.output_root")
    config.drop("not needed: a run writes everything to runs/NAME", "logger.root", "saver.cp_root")
    return recipe


def _model(config: ForeignConfig, name: str) -> dict[str, Any]:
    model: dict[str, Any] = {
        "name": _MODELS.get(name, f"timm/{name}"),
        "num_classes": config.take("dataset.num_classes"),
    }
    if name not in _MODELS:
        config.remark("model.name", "changed: taken as the name of a timm model")
    if file := config.take("model.model_file.pretrain"):
        exclude = config.take("model.model_file.exclude") or []
        excluded = [exclude] if isinstance(exclude, str) else exclude
        model["weights"] = {"file": file} | ({"exclude": [f"{each}.*" for each in excluded]} if excluded else {})
    config.drop("not converted: start with `paceline train RECIPE --from CHECKPOINT`", "model.model_file.checkpoint")
    config.take("model.model_file")
    branches = [branch for branch in str(config.take("model.freeze_branch") or "").split(",") if branch]
    return model | ({"freeze": branches} if branches else {})


def _data(config: ForeignConfig) -> dict[str, Any]:
    size = config.number("dataset.transform.image_size", 224)
    share = config.number("dataset.train_perc", 0.9)
    split = {
        "dataset": "image_folder",
        "root": config.take("dataset.root"),
        "split_shares": {"train": share, "val": round(1 - share, 6)},
    }
    augmented = [
        {"name": "random_resized_crop", "size": size, "scale": [0.3, 1.0], "ratio": [0.8, 1.25]},
        {"name": "random_rotation", "degrees": config.number("dataset.transform.max_rotate_angle", 0), "fill": 127},
        {"name": "random_horizontal_flip"},
        NORMALIZE,
    ]
    plain = [{"name": "resize", "size": int(1.15 * size)}, {"name": "center_crop", "size": size}, NORMALIZE]
    config.drop("not needed: the pipeline never read it; it normalizes by ImageNet's mean", "dataset.transform.mean")
    config.drop("not needed: class names are sorted, and the split is drawn by `split_seed`", "dataset.label_file")
    config.drop("not needed: no lists are written", "dataset.txt_root")
    config.remark(
        "dataset.loader.batch_size",
        "changed: there per GPU, here over all processes; multiply it by the number of GPUs that you used",
    )
    return {
        "batch_size": config.number("dataset.loader.batch_size"),
        "loader": "dali",
        "num_workers": config.number("dataset.loader.num_workers", 4),
        "train": {**split, "split": "train", "transforms": augmented},
        "val": {**split, "split": "val", "transforms": plain},
    }


def _optimizer(config: ForeignConfig) -> dict[str, Any]:
    name = str(config.take("optimizer.name"))
    optimizer: dict[str, Any] = {"name": name.lower(), "lr": config.number("optimizer.lr")}
    momentum, decay = config.number("optimizer.momentum", 0.0), config.number("optimizer.weight_decay", 0.0)
    if name in _WITHOUT_DECAY:
        for key in ("momentum", "weight_decay"):
            config.remark(f"optimizer.{key}", f"not converted: that program does not pass it to {name}")
        return optimizer
    return {**optimizer, "momentum": momentum, "weight_decay": decay}
