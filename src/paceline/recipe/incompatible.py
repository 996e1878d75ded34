"""Incompatible combinations of keys; errors name both."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.registry import register
from paceline.recipe.schema import Recipe

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
_PARTS = ("split_shares", "split_column", "fold")
_FOR_TRAINING = ("mixup", "cutmix", "mixup_or_cutmix", "multi_scale")


def cross_checks(recipe: Recipe) -> list[Check]:
    """All incompatible combinations in a recipe."""
    return [
        *_either_or(recipe),
        *_model(recipe),
        *_losses(recipe),
        *_data(recipe),
        *_drawn_splits(recipe),
        *_param_groups(recipe),
        *_schedule(recipe),
        *_exactness(recipe),
        *_sharding(recipe),
        *_precision(recipe),
        *_metrics(recipe),
    ]


def _either_or(recipe: Recipe) -> Iterator[Check]:
    for epochs, steps in _EITHER:
        if _value(recipe, epochs) and _value(recipe, steps):
            yield [steps, epochs], f"incompatible with {epochs}; remove one of them, or set {epochs} to null"
    if recipe.train.epochs is None and recipe.train.steps is None:
        yield ["train.epochs"], "expected train.epochs or train.steps, got neither"


def _model(recipe: Recipe) -> Iterator[Check]:
    model = recipe.model
    if model.unfreeze and not model.freeze:
        yield ["model.unfreeze", "model.freeze"], "given, but model.freeze is empty"
    for index, stage in enumerate(model.unfreeze):
        if (stage.at_epochs is None) == (stage.at_steps is None):
            yield [f"model.unfreeze.{index}"], "expected one of at_epochs and at_steps"


def _losses(recipe: Recipe) -> Iterator[Check]:
    task = register.kind("task").find(recipe.task.name)
    assert task is not None, "validation let an unknown task through"
    if task.takes_losses and not recipe.losses:
        yield ["losses"], "expected a list of at least 1 item, got none"
    if recipe.losses and not task.takes_losses:
        found, cure = "brings its own losses", "remove these"
        if not isinstance(task.target, str):
            found = "does not take them: its __init__ has neither `losses` nor `**parts`"
            example = "def __init__(self, …, **parts): super().__init__(**parts)"
            cure = f"write `{example}`, or remove these if it brings its own"
        yield ["losses"], f"task {task.name} {found}; {cure}"
    names = [loss.name for loss in recipe.losses]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ["losses"], f"{name} is listed more than once"


def _data(recipe: Recipe) -> Iterator[Check]:
    micro, batch = recipe.train.micro_batch_size, recipe.data.batch_size
    if micro != "auto" and micro > batch:
        message = f"expected at most data.batch_size ({batch}), got {micro}"
        yield ["train.micro_batch_size", "data.batch_size"], message
    for split, part in recipe.data.splits().items():
        for index, transform in enumerate(part.transforms):
            if split != "train" and transform.name in _FOR_TRAINING:
                yield [f"data.{split}.transforms.{index}"], f"{transform.name} is for training only; remove it"


def _drawn_splits(recipe: Recipe) -> Iterator[Check]:
    """Splits drawn from the same samples must use the same shares and seed, or they overlap."""
    drawn = {split: (part.dataset, part.model_extra or {}) for split, part in recipe.data.splits().items()}
    dataset, train = drawn.pop("train")
    for split, (name, own) in drawn.items():
        parts = _PARTS if "fold_column" in own else _PARTS[:2]  # a user's `fold` may mean anything
        is_part = any(each.get(key) is not None for each in (own, train) for key in parts)
        if name != dataset or not is_part or any(own.get(key) != train.get(key) for key in _PLACES):
            continue
        defaults = {
            key: True if key == "stratify" else None for key in (*parts, "split_seed", "stratify", "fold_column")
        }
        for key, default in defaults.items():
            if own.get(key, default) != train.get(key, default):
                keys = [f"data.{split}.{key}", f"data.train.{key}"]
                yield keys, f"differs from data.train.{key}, so splits would overlap"
        if own.get("split") == train.get("split"):
            keys = [f"data.{split}.split", "data.train.split"]
            yield keys, "is the same split of the same samples as data.train.split"


def _param_groups(recipe: Recipe) -> Iterator[Check]:
    kinds: set[str] = set()
    for index, group in enumerate(recipe.optimizer.param_groups):
        keys = [f"optimizer.param_groups.{index}"]
        others = ", ".join(name for name, value in group if value is not None and name != "preset")
        if group.preset is not None and others:
            yield keys, f"a preset takes no other key, got {others}; give these an entry of their own"
        elif group.preset is None and group.kind is None and group.match is None:
            yield keys, "expected preset, kind or match, got none of them"
        elif group.preset is None and group.lr_scale is None and group.weight_decay is None:
            yield keys, "expected lr_scale or weight_decay, got neither"
        elif group.kind is not None and group.match is None and group.kind in kinds:
            yield keys, f"the kind {group.kind} is listed before; list each kind once"
        if group.kind is not None and group.match is None:
            kinds.add(group.kind)


def _schedule(recipe: Recipe) -> Iterator[Check]:
    schedule, train = recipe.schedule, recipe.train
    keys = [key for key in ("warmup_epochs", "warmup_steps") if getattr(schedule, key)]
    if schedule.warmup == "none" and keys:
        message = f"given, but schedule.warmup is none; set that to linear, or schedule.{keys[0]} to null"
        yield [f"schedule.{keys[0]}", "schedule.warmup"], message
    elif schedule.warmup == "constant" and not schedule.warmup_from:
        yield ["schedule.warmup_from", "schedule.warmup"], "expected a share > 0, since schedule.warmup is constant"
    elif schedule.warmup != "none" and not keys:
        message = "needs schedule.warmup_epochs or schedule.warmup_steps greater than 0; or set it to none"
        yield ["schedule.warmup"], message
    elif schedule.per == "epoch" and schedule.warmup == "linear" and not (schedule.warmup_from or schedule.count_from):
        message = "with schedule.per epoch, 0 makes the learning rate of the first epoch 0; set it to 1"
        yield ["schedule.count_from", "schedule.per"], message
    else:
        for key, unit in (("warmup_epochs", "epochs"), ("warmup_steps", "steps")):
            warmup, total = getattr(schedule, key), getattr(train, unit)
            if warmup and total and warmup >= total:
                message = f"expected less than train.{unit} ({total}), got {warmup:g}"
                yield [f"schedule.{key}", f"train.{unit}"], message


def _exactness(recipe: Recipe) -> Iterator[Check]:
    """What is not reproducible on other numbers of processes, or after a restart."""
    train = recipe.train
    strategy = train.strategy.name
    if train.reproducible == "world":
        here = ["train.reproducible", "train.strategy"]
        if strategy not in ("auto", "single", "ddp"):
            yield here, f"world is incompatible with train.strategy {strategy}; use auto"
        if train.sync_bn:
            message = "world is incompatible with train.sync_bn: statistics would depend on the processes"
            yield ["train.reproducible", "train.sync_bn"], message


def _sharding(recipe: Recipe) -> Iterator[Check]:
    """What needs whole parameters on every rank."""
    train = recipe.train
    strategy = train.strategy.name
    if strategy not in ("fsdp", "zero"):
        return
    if train.precision in ("O2", "O3"):
        message = f"expected fp32, tf32, bf16, fp16, O0 or O1 with train.strategy {strategy}, got {train.precision}"
        yield ["train.precision", "train.strategy"], message
    if recipe.optimizer.name in ("adafactor", "rprop"):
        message = f"{recipe.optimizer.name} is incompatible with train.strategy {strategy}; use adamw or sgd"
        yield ["optimizer.name", "train.strategy"], message
    if train.adaptive_clip is not None:
        message = f"incompatible with train.strategy {strategy}, which shards units; use train.clip_grad_norm"
        yield ["train.adaptive_clip", "train.strategy"], message
    if train.compile:
        message = f"incompatible with train.strategy {strategy}; remove one of them"
        yield ["train.compile", "train.strategy"], message


def _precision(recipe: Recipe) -> Iterator[Check]:
    """Keys that need another precision."""
    train = recipe.train
    if train.keep_norms_fp32 is not None and train.precision not in ("O2", "O3"):
        message = f"given, but train.precision {train.precision} keeps all weights in float32; remove it or use O2"
        yield ["train.keep_norms_fp32", "train.precision"], message
    if train.loss_scale is not None and train.precision not in ("fp16", "O1", "O2", "O3"):
        message = f"given, but train.precision {train.precision} needs no loss scale; remove it or use fp16"
        yield ["train.loss_scale", "train.precision"], message


def _metrics(recipe: Recipe) -> Iterator[Check]:
    if recipe.data.val is None and recipe.data.test is None:
        if recipe.expect:
            yield ["expect", "data.val"], "given, but there is neither data.val nor data.test"
        if recipe.checkpoint.best not in (None, "auto"):
            message = "given, but there is no data.val; add data.val or set it to null"
            yield ["checkpoint.best", "data.val"], message


def _value(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
