"""What trains, as source: parameter groups, optimizer, schedules, precision, strategy, state and run."""

from __future__ import annotations

from torch import nn

from paceline.commands.ejected_parts import Always, PartWriter, Statements, Supplied, variable_of, without_defaults
from paceline.commands.python_source import Code, call, value
from paceline.data.loader import TrainBatches
from paceline.engine.precision.mixed import make_precision
from paceline.engine.run import Run, RunInfo, make_evaluation_set
from paceline.models.surgery import find_heads
from paceline.optim.lr_scheduler import LRChangeLog, Schedule, Transition
from paceline.optim.optimizers import accepts
from paceline.optim.trust_ratio import add_trust_ratio
from paceline.recipe.build_engine import may_continue
from paceline.recipe.build_optim import group_settings
from paceline.recipe.schema import OptimizerPart, SchedulePart, Train, TransitionPart

_SHARDED = ("fsdp", "zero")
_HALF_WEIGHTS = ("O2", "O3")


def write_optimizer(file: Statements) -> None:
    """Activation checkpointing, frozen layers, parameter groups, optimizer and schedules."""
    train, part = file.recipe.train, file.recipe.optimizer
    checkpointing, model = train.activation_checkpointing, file.recipe.model
    if checkpointing.name != "none":
        key = "train.activation_checkpointing"
        made = file.write.part(key, "activation_checkpointing", checkpointing.name, checkpointing.model_extra, {})
        file.add(f"{made}.apply(model)")
    file.section("The schedule is a function of the step; a group multiplies it by its lr_scale.")
    if model.freeze or model.unfreeze:
        _freezing(file)
    if train.strategy.name in _SHARDED:
        file.add(_strategy(file), "before the optimizer, which gets shards", to="strategy")
    file.add(_groups(file.write, part), to="groups")
    file.add(_optimizer(file.write, part, file.run.model), to="optimizer")
    if model.unfreeze:
        file.add("freezing.apply(0)")
    if part.trust_ratio is not None:
        ratio = without_defaults(add_trust_ratio, part.trust_ratio.model_dump())
        file.add(file.write.call("optim.trust_ratio.add_trust_ratio", "optimizer", **ratio))
    file.add(_scheduler(file.write, file.recipe.schedule), to="scheduler")


def _freezing(file: Statements) -> None:
    part = file.recipe.model
    stages = [
        Code("(", [Code(_stage(stage.at_epochs, stage.at_steps)), value(stage.match)], ")") for stage in part.unfreeze
    ]
    more = [value(stages)] if stages else []
    file.add(file.write.call("models.freezing.Freezing", "model", value(part.freeze), *more), to="freezing")
    if stages:
        file.add("freezing.apply(progress.total_steps)", "the optimizer gets all that is ever trained")


def _strategy(file: Statements) -> Code:
    part, reproducible = file.recipe.train.strategy, file.recipe.train.reproducible
    if reproducible == "world":
        return file.write.call("engine.strategies.deterministic.DeterministicStrategy", "model", "world")
    supplied: Supplied = {
        "model": ("model", Always),
        "world": ("world", Always),
        "is_exact": (str(reproducible != "off"), Always),
    }
    if part.name == "dp":
        count = file.imports.name("torch.cuda", "device_count")
        devices = f'list(range({count}())) if world.device.type == "cuda" else []'
        supplied = {**supplied, "devices": (devices, Always)}
    name = "ddp" if part.name == "auto" else part.name  # which is `single` in one process
    return file.write.part("train.strategy", "strategy", name, part.model_extra, supplied)


def write_strategy(file: Statements) -> None:
    """Precision, strategy, and the batches of a process."""
    data, train = file.recipe.data, file.recipe.train
    file.section("What a process computes in, how processes share gradients, what each of them reads.")
    named = without_defaults(make_precision, {"loss_scale": train.loss_scale, "keep_norms": train.keep_norms_fp32})
    file.add(
        file.write.call("engine.precision.mixed.make_precision", value(train.precision), "world.device", **named),
        to="precision",
    )
    if train.precision in _HALF_WEIGHTS:
        file.add("master_model = precision.attach(model)", "the optimizer's weights; the model computes in float16")
        file.add(file.write.call("engine.precision.mixed.fit_half_weights", "optimizer"))
    if train.compile:
        file.add(file.write.call("engine.torch_settings.compile_model", "model"))
    if train.strategy.name not in _SHARDED:
        is_plain = train.strategy.name == "auto" and train.reproducible != "world"
        file.add(_strategy(file), "alone, the model as it is" if is_plain else "", to="strategy")
    order = file.write.call("data.sampler.Permutation", "sampler.size", "SEED")
    workers = None if data.num_workers == "auto" else data.num_workers
    named = without_defaults(TrainBatches, {"workers": workers, "kind": data.loader})
    first = ("train_loader", "sampler", order, "world", "progress")
    file.add(file.write.call("data.loader.TrainBatches", *first, passes="strategy.passes", **named), to="batches")


def write_state(file: Statements) -> None:
    """What checkpoints hold."""
    train = file.recipe.train
    channels_last = None if train.channels_last == "auto" else train.channels_last
    chosen = ("threads", "micro_batch_size", "world.size")
    policy = [] if train.on_nonfinite == "stop" else [value(train.on_nonfinite)]
    named: dict[str, Code | str] = {
        "model": "master_model" if train.precision in _HALF_WEIGHTS else "model",
        **{name: name for name in ("optimizer", "progress", "strategy", "precision")},
        "choices": file.write.call("engine.state.Choices", *chosen, channels_last=value(channels_last)),
        "finite_check": file.write.call("engine.nonfinite.make_finite_check", "world.device", *policy),
    }
    if train.averaging.name != "none":
        length = {key: (f"progress.{key}", Always) for key in ("total_steps", "steps_per_epoch")}
        part = train.averaging
        named["averaging"] = file.write.part("train.averaging", "averaging", part.name, part.model_extra, length)
    if file.builder.parts:
        part_names = {name: name.removeprefix("loss ") for name in file.builder.parts}
        parts = {key: Code("task" if key == "task" else f"losses[{value(name)}]") for key, name in part_names.items()}
        named["parts"] = value(parts)
    file.section("Checkpoints hold the state; everything else is built again when a run continues.")
    file.add(file.write.call("engine.state.RunState", **named), to="state")


def write_run(file: Statements) -> None:
    """The run, which `build` returns."""
    recipe, store = file.recipe, file.run.store
    named: dict[str, Code | str] = {"name": value(recipe.name), "out": "out", "seed": "SEED"}
    named |= {name: name for name in ("world", "task", "model", "state", "scheduler", "train_loader", "batches")}
    named["evaluations"] = _evaluations(file)
    named["intervals"] = _intervals(file)
    kept = {key: getattr(store, key) for key in ("keep_last", "best", "direction", "keep_every")}
    folder = 'out / "checkpoints"'
    named["store"] = file.write.call("checkpoint.store.Store", folder, **without_defaults(type(store), kept))
    named["clip_gradients"] = _clip(file.write, recipe.train)
    if recipe.model.freeze or recipe.model.unfreeze:
        named["freezing"] = "freezing"
    if changes := without_defaults(LRChangeLog, {"ratio": recipe.logging.lr_change_ratio}):
        named["lr_changes"] = file.write.call("optim.lr_scheduler.LRChangeLog", **changes)
    if may_continue(file.builder):
        named["buffer_backup"] = file.write.call("engine.nonfinite.BufferBackup", "model", "state.parts")
    named["explain_nonfinite"] = file.write.name("engine.replay", "explain_nonfinite")
    switches = {"visualize": recipe.logging.images, "save_predictions": recipe.evaluate.save_predictions}
    named |= without_defaults(Run, switches)
    named["info"] = _info(file)
    file.add(file.write.call("engine.run.Run", **named).after("return "))


def _evaluations(file: Statements) -> Code:
    evaluate = file.recipe.evaluate
    make = "engine.run.make_evaluation_set"
    settings = {key: getattr(evaluate, key) for key in ("batch_size", "num_workers", "threads")}
    named = without_defaults(make_evaluation_set, settings)
    loaders = {split: f"{variable_of(split)}_loader" for split in file.run.evaluations}
    return value({split: file.write.call(make, loader, "world", **named) for split, loader in loaders.items()})


def _intervals(file: Statements) -> Code:
    recipe, epoch = file.recipe, "progress.steps_per_epoch"
    evaluate, logging, checkpoint = recipe.evaluate, recipe.logging, recipe.checkpoint
    named = {
        "evaluate": _duration(evaluate.every_epochs, evaluate.every_steps) or epoch,
        "log": _duration(logging.every_epochs, logging.every_steps) or "20",
        "save": _duration(checkpoint.every_epochs, checkpoint.every_steps) or epoch,
    }
    return file.write.call("engine.run.Intervals", **named)


def _info(file: Statements) -> Code:
    info = file.run.info
    named = {"task": value(info.task), "model": value(info.model), "lr": Code('f"{LR:g}"')}
    if file.recipe.model.weights is not None:
        named["origin_of_weights"] = Code("report.summary()")
    usual = RunInfo()
    for key in ("precision", "expect", "hang_seconds", "tensorboard", "results", "wandb", "mlflow"):
        if getattr(info, key) != getattr(usual, key):
            named[key] = value(getattr(info, key))
    return file.write.call("engine.run.RunInfo", **named)


def _groups(write: PartWriter, part: OptimizerPart) -> Code:
    """The parameter groups."""
    wanted = group_settings(part)
    named = {"weight_decay": value(part.weight_decay)}
    if wanted.kinds:
        named["kinds"] = value({kind: write.dataclass(each) for kind, each in wanted.kinds.items()})
    if wanted.rules:
        named["rules"] = value([write.dataclass(rule) for rule in wanted.rules])
    if part.layer_map and part.layer_decay:
        _, own, _ = write.target("optimizer.layer_map", "layer_map", part.layer_map)
        named["layers"] = write.call("optim.layer_decay.make_layers", "model", f"{own}(model)")
    if part.layer_decay is not None:
        named["layer_decay"] = value(part.layer_decay)
    flags = {"no_decay_1d": wanted.no_decay_1d, "use_no_weight_decay": wanted.use_no_weight_decay}
    named |= {name: value(True) for name, is_set in flags.items() if is_set}
    return write.call("optim.param_groups.build_groups", "model", **named)


def _optimizer(write: PartWriter, part: OptimizerPart, model: nn.Module) -> Code:
    """The optimizer over `groups`."""
    target, own, first = write.target("optimizer", "optimizer", part.name)
    arguments = dict(part.model_extra or {})
    if part.name == "muon":  # meant for hidden layers
        arguments["adamw"] = [*arguments["adamw"], *find_heads(model)]
    tuples = {key: tuple(each) if isinstance(each, list) else each for key, each in arguments.items()}
    named = {**without_defaults(target, tuples), "lr": Code("LR")}
    if accepts(target, "weight_decay"):
        named["weight_decay"] = value(part.weight_decay)
    return call(own, *first, "[group.as_optimizer_group(LR) for group in groups]", **named)


def _scheduler(write: PartWriter, part: SchedulePart) -> Code:
    """The schedules of learning rate, momentum and weight decay."""
    transitions = {"momentum": part.momentum, "weight_decay": part.weight_decay}
    named = {name: _schedule(write, Transition, each) for name, each in transitions.items() if each is not None}
    lr = _schedule(write, Schedule, part)
    return write.call("optim.lr_scheduler.Scheduler", "optimizer", lr, **named)


_OTHER_KEYS = ("decay", "momentum", "weight_decay")


def _schedule(write: PartWriter, kind: type, part: SchedulePart | TransitionPart) -> Code:
    decay, own, _ = write.target("schedule.decay", "schedule", part.decay)
    keys = {key: getattr(part, key) for key in type(part).model_fields if key not in _OTHER_KEYS}
    first = ["LR"] if kind is Schedule else [repr(keys.pop("start")), repr(keys.pop("end"))]
    if not (keys.get("warmup_epochs") or keys.get("warmup_steps")):
        keys = {key: each for key, each in keys.items() if not key.startswith("warmup")}
    arguments = without_defaults(decay, part.model_extra or {})
    length = {key: Code(f"progress.{key}") for key in ("total_steps", "steps_per_epoch")}
    more = [value(arguments)] if arguments else []
    return write.call(
        f"optim.lr_scheduler.{kind.__name__}", *first, own, *more, **length, **without_defaults(kind, keys)
    )


def _clip(write: PartWriter, train: Train) -> Code:
    """The gradient clipping, or what measures the norm alone."""
    limits = {"ClipGradNorm": train.clip_grad_norm, "ClipGradValue": train.clip_grad_value}
    for name, limit in limits.items():
        if limit is not None:
            measure = write.call("optim.clipping.NoClip", "strategy.norm_across")
            return write.call(f"optim.clipping.{name}", value(limit), measure)
    if train.adaptive_clip is not None:
        heads = write.call("models.surgery.head_parameters", "model")
        return write.call("optim.clipping.AdaptiveClip", value(train.adaptive_clip), skip=heads)
    return write.call("optim.clipping.norm_alone", "world.device", "strategy.norm_across")


def _duration(epochs: float | None, steps: int | None) -> str:
    """A duration in steps as an expression; empty for none."""
    if steps is not None:
        return str(steps)
    if epochs is None:
        return ""
    return "progress.steps_per_epoch" if epochs == 1 else f"{epochs:g} * progress.steps_per_epoch"


def _stage(epochs: float | None, steps: int | None) -> str:
    return str(steps) if steps is not None else f"round({_duration(epochs, None)})"
