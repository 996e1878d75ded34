"""Incompatible combinations of keys; errors name both."""

from __future__ import annotations

from paceline.core.registry import register
from paceline.recipe.schema import DatasetPart, Recipe

Check = tuple[list[str], str]
"""The keys involved, and a message."""

_EITHER = [
    ("schedule.floor_lr", "schedule.floor"),
    ("train.clip_grad_norm", "train.clip_grad_value"),
    ("train.clip_grad_norm", "train.adaptive_clip"),
    ("train.clip_grad_value", "train.adaptive_clip"),
    ("train.epochs", "train.steps"),
    ("evaluate.every_epochs", "evaluate.every_steps"),
    ("checkpoint.every_epochs", "checkpoint.every_steps"),
    ("logging.every_epochs", "logging.every_steps"),
    ("schedule.warmup_epochs", "schedule.warmup_steps"),
]
_PLACES = ("root", "file", "images", "annotations", "list_file", "joints")
_FOR_TRAINING = ("mixup", "cutmix", "mixup_or_cutmix", "mosaic", "multi_scale")


def cross_checks(recipe: Recipe) -> list[Check]:
    """All incompatible combinations in a recipe."""
    return [
        *_either_or(recipe),
        *_model(recipe),
        *_losses(recipe),
        *_batch(recipe),
        *_transforms(recipe),
        *_drawn_splits(recipe),
        *_param_groups(recipe),
        *_schedule(recipe),
        *_exactness(recipe),
        *_sharding(recipe),
        *_precision(recipe),
        *_metrics(recipe),
        *_names(recipe),
    ]


def _either_or(recipe: Recipe) -> list[Check]:
    found = []
    for epochs, steps in _EITHER:
        if _value(recipe, epochs) and _value(recipe, steps):
            found.append(([steps, epochs], f"incompatible with {epochs}; remove one of them, or set {epochs} to null"))
    if recipe.train.epochs is None and recipe.train.steps is None:
        found.append((["train.epochs"], "expected train.epochs or train.steps, got neither"))
    return found


def _model(recipe: Recipe) -> list[Check]:
    model = recipe.model
    found = []
    if model.unfreeze and not model.freeze:
        found.append((["model.unfreeze", "model.freeze"], "given, but model.freeze is empty"))
    for index, stage in enumerate(model.unfreeze):
        if (stage.at_epochs is None) == (stage.at_steps is None):
            found.append(([f"model.unfreeze.{index}"], "expected one of at_epochs and at_steps"))
    return found


def _losses(recipe: Recipe) -> list[Check]:
    task = register.kind("task").find(recipe.task.name)
    assert task is not None, "validation let an unknown task through"
    if task.takes_losses and not recipe.losses:
        return [(["losses"], "expected a list of at least 1 item, got none")]
    if recipe.losses and not task.takes_losses:
        return [(["losses"], f"task {task.name} brings its own losses; remove these")]
    return []


def _transforms(recipe: Recipe) -> list[Check]:
    return [
        ([f"data.{split}.transforms.{index}"], f"{transform.name} is for training only; remove it")
        for split, part in _parts(recipe)
        for index, transform in enumerate(part.transforms)
        if split != "train" and transform.name in _FOR_TRAINING
    ]


def _drawn_splits(recipe: Recipe) -> list[Check]:
    """Splits drawn from the same samples must use the same shares and seed, or they overlap."""
    drawn = {split: (part.dataset, part.model_extra or {}) for split, part in _parts(recipe)}
    dataset, train = drawn.pop("train")
    found: list[Check] = []
    for split, (name, own) in drawn.items():
        is_part = own.get("split_shares") or own.get("split_column") is not None
        if name != dataset or not is_part or any(own.get(key) != train.get(key) for key in _PLACES):
            continue
        for key in ("split_shares", "split_seed", "split_column"):
            if own.get(key) != train.get(key):
                keys = [f"data.{split}.{key}", f"data.train.{key}"]
                found += [(keys, f"differs from data.train.{key}, so splits would overlap")]
        if own.get("split") == train.get("split"):
            keys = [f"data.{split}.split", "data.train.split"]
            found += [(keys, "is the same split of the same samples as data.train.split")]
    return found


def _parts(recipe: Recipe) -> list[tuple[str, DatasetPart]]:
    return list(recipe.data.splits().items())


def _batch(recipe: Recipe) -> list[Check]:
    micro, batch = recipe.train.micro_batch_size, recipe.data.batch_size
    if micro != "auto" and micro > batch:
        message = f"expected at most data.batch_size ({batch}), got {micro}"
        return [(["train.micro_batch_size", "data.batch_size"], message)]
    return []


def _param_groups(recipe: Recipe) -> list[Check]:
    found: list[Check] = []
    kinds: set[str] = set()
    for index, group in enumerate(recipe.optimizer.param_groups):
        keys = [f"optimizer.param_groups.{index}"]
        others = ", ".join(name for name, value in group if value is not None and name != "preset")
        if group.preset is not None and others:
            found.append((keys, f"a preset takes no other key, got {others}; give these an entry of their own"))
        elif group.preset is None and group.kind is None and group.match is None:
            found.append((keys, "expected preset, kind or match, got none of them"))
        elif group.preset is None and group.lr_scale is None and group.weight_decay is None:
            found.append((keys, "expected lr_scale or weight_decay, got neither"))
        elif group.kind is not None and group.match is None and group.kind in kinds:
            found.append((keys, f"the kind {group.kind} is listed before; list each kind once"))
        if group.kind is not None and group.match is None:
            kinds.add(group.kind)
    return found


def _schedule(recipe: Recipe) -> list[Check]:
    schedule, train = recipe.schedule, recipe.train
    keys = [key for key in ("warmup_epochs", "warmup_steps") if getattr(schedule, key)]
    if schedule.warmup == "none" and keys:
        message = f"given, but schedule.warmup is none; set that to linear, or schedule.{keys[0]} to null"
        return [([f"schedule.{keys[0]}", "schedule.warmup"], message)]
    if schedule.warmup == "constant" and not schedule.warmup_from:
        return [
            (["schedule.warmup_from", "schedule.warmup"], "expected a share > 0, since schedule.warmup is constant")
        ]
    if schedule.warmup != "none" and not keys:
        return [
            (
                ["schedule.warmup"],
                "needs schedule.warmup_epochs or schedule.warmup_steps greater than 0; or set it to none",
            )
        ]
    if schedule.per == "epoch" and schedule.warmup == "linear" and not (schedule.warmup_from or schedule.count_from):
        message = "with schedule.per epoch, 0 makes the learning rate of the first epoch 0; set it to 1"
        return [(["schedule.count_from", "schedule.per"], message)]
    for key, unit in (("warmup_epochs", "epochs"), ("warmup_steps", "steps")):
        warmup, total = getattr(schedule, key), getattr(train, unit)
        if warmup and total and warmup >= total:
            message = f"expected less than train.{unit} ({total}), got {warmup:g}"
            return [([f"schedule.{key}", f"train.{unit}"], message)]
    return []


def _exactness(recipe: Recipe) -> list[Check]:
    """What is not reproducible on other numbers of processes, or after a restart."""
    train = recipe.train
    strategy = train.strategy.name
    compression = (train.strategy.model_extra or {}).get("compression", "none")
    found: list[Check] = []
    if train.reproducible == "world":
        here = ["train.reproducible", "train.strategy"]
        if strategy not in ("auto", "single", "ddp"):
            found.append((here, f"world is incompatible with train.strategy {strategy}; use auto"))
        if compression != "none":
            found.append((here, f"world is incompatible with gradient compression {compression}; use none"))
        if train.sync_bn:
            message = "world is incompatible with train.sync_bn: statistics would depend on the processes"
            found.append((["train.reproducible", "train.sync_bn"], message))
    if train.reproducible == "run" and compression == "powersgd":
        message = "powersgd keeps an error buffer that no checkpoint holds; set train.reproducible to off"
        found.append((["train.strategy", "train.reproducible"], message))
    return found


def _sharding(recipe: Recipe) -> list[Check]:
    """What needs whole parameters on every rank."""
    train = recipe.train
    strategy = train.strategy.name
    if strategy not in ("fsdp", "zero"):
        return []
    found: list[Check] = []
    if train.precision in ("O2", "O3"):
        message = f"expected fp32, tf32, bf16, fp16, O0 or O1 with train.strategy {strategy}, got {train.precision}"
        found.append((["train.precision", "train.strategy"], message))
    if recipe.optimizer.name in ("adafactor", "rprop"):
        message = f"{recipe.optimizer.name} is incompatible with train.strategy {strategy}; use adamw or sgd"
        found.append((["optimizer.name", "train.strategy"], message))
    if train.adaptive_clip is not None:
        message = f"incompatible with train.strategy {strategy}, which shards units; use train.clip_grad_norm"
        found.append((["train.adaptive_clip", "train.strategy"], message))
    if train.compile:
        message = f"incompatible with train.strategy {strategy}; remove one of them"
        found.append((["train.compile", "train.strategy"], message))
    return found


def _precision(recipe: Recipe) -> list[Check]:
    """Keys that need another precision."""
    train = recipe.train
    found: list[Check] = []
    if train.keep_norms_fp32 is not None and train.precision not in ("O2", "O3"):
        message = f"given, but train.precision {train.precision} keeps all weights in float32; remove it or use O2"
        found.append((["train.keep_norms_fp32", "train.precision"], message))
    if train.loss_scale is not None and train.precision not in ("fp16", "O1", "O2", "O3"):
        message = f"given, but train.precision {train.precision} needs no loss scale; remove it or use fp16"
        found.append((["train.loss_scale", "train.precision"], message))
    return found


def _metrics(recipe: Recipe) -> list[Check]:
    found = []
    if recipe.data.val is None and recipe.data.test is None:
        if recipe.expect:
            found.append((["expect", "data.val"], "given, but there is neither data.val nor data.test"))
        if recipe.checkpoint.best not in (None, "auto"):
            message = "given, but there is no data.val; add data.val or set it to null"
            found.append((["checkpoint.best", "data.val"], message))
    return found


def _names(recipe: Recipe) -> list[Check]:
    names = [loss.name for loss in recipe.losses]
    doubled = sorted({name for name in names if names.count(name) > 1})
    return [(["losses"], f"{name} is listed more than once") for name in doubled]


def _value(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
