"""What trains, as source: parameter groups, optimizer, schedules, precision, strategy, state and run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from paceline.commands.ejected_parts import Statements, variable_of, without_defaults
from paceline.commands.python_source import Code, call, value
from paceline.core.signatures import signature_of
from paceline.engine.run import Run, RunInfo
from paceline.optim.lr_scheduler import LRChangeLog, Schedule, Transition
from paceline.optim.optimizers import accepts
from paceline.recipe.build_training import group_settings, optimizer_arguments
from paceline.recipe.schema import SchedulePart, TransitionPart

_SHARDED = ("fsdp", "zero")
_HALF_WEIGHTS = ("O2", "O3")
_OF_RECIPES = ("recipe_yaml", "notes", "lr", "checkpointed_blocks", "origin_of_weights")
"""What a run knows about itself that follows from its recipe."""


def write_optimizer(file: Statements) -> None:
    """Activation checkpointing, frozen layers, parameter groups, optimizer and schedules."""
    train, part, model = file.recipe.train, file.recipe.optimizer, file.recipe.model
    if train.activation_checkpointing.name != "none":
        key = "activation_checkpointing"
        file.add(f"{file.part(f'train.{key}', key, train.activation_checkpointing)}.apply(model)")
    file.section("Optimizer. The learning rate is a function of the step; a group multiplies it by its lr_scale.")
    if model.freeze or model.unfreeze:
        stages = [(Code(_steps(each, "at") or "0"), each.match) for each in model.unfreeze]
        named = {"unfreeze": stages} if stages else {}
        file.set("freezing", file.call("models.freezing.Freezing", "model", value(model.freeze), **named))
    if model.unfreeze:
        file.add("freezing.apply(progress.total_steps)", "the optimizer gets all that is ever trained")
    if train.strategy.name in _SHARDED:
        file.set("strategy", _strategy(file), "before the optimizer, which gets shards")
    file.set("groups", _groups(file))
    file.set("optimizer", _optimizer(file))
    if model.unfreeze:
        file.add("freezing.apply(0)")
    if part.trust_ratio is not None:
        file.add(file.call("optim.optimizers.add_trust_ratio", "optimizer", **part.trust_ratio.model_dump()))
    schedule = file.recipe.schedule
    transitions = {"momentum": schedule.momentum, "weight_decay": schedule.weight_decay}
    others = {name: _schedule(file, Transition, each) for name, each in transitions.items() if each is not None}
    file.set("schedule", _schedule(file, Schedule, schedule))
    file.set("scheduler", file.call("optim.lr_scheduler.Scheduler", "optimizer", "schedule", **others))


def _groups(file: Statements) -> Code:
    """The parameter groups."""
    part = file.recipe.optimizer
    wanted = group_settings(part)
    named: dict[str, Any] = {"no_decay_1d": wanted.no_decay_1d, "use_no_weight_decay": wanted.use_no_weight_decay}
    if wanted.kinds:
        named["kinds"] = {kind: file.made(each) for kind, each in wanted.kinds.items()}
    if wanted.rules:
        named["rules"] = [file.made(rule) for rule in wanted.rules]
    if part.layer_map and part.layer_decay:
        layer_map = file.target("optimizer.layer_map", "layer_map", part.layer_map)[1]
        named["layers"] = file.call("optim.layer_decay.make_layers", "model", f"{layer_map}(model)")
    decays = {"weight_decay": part.weight_decay, "layer_decay": part.layer_decay}
    return file.call("optim.param_groups.build_groups", "model", **decays, **named)


def _optimizer(file: Statements) -> Code:
    """The optimizer over `groups`."""
    part = file.recipe.optimizer
    target, own, first = file.target("optimizer", "optimizer", part.name)
    arguments = file.explicit("optimizer", target, optimizer_arguments(part, file.run.model))
    named = {key: tuple(each) if isinstance(each, list) else each for key, each in arguments.items()}
    named["lr"] = Code("LR")
    if accepts(target, "weight_decay"):
        named["weight_decay"] = part.weight_decay
    return call(own, *first, "[group.as_optimizer_group(LR) for group in groups]", **named)


def _schedule(file: Statements, kind: type[Schedule | Transition], part: SchedulePart | TransitionPart) -> Code:
    target, own, _ = file.target("schedule.decay", "schedule", part.decay)
    keys = {key: getattr(part, key) for key in signature_of(kind).parameters if hasattr(part, key)}
    del keys["decay"]
    first = ["LR"] if kind is Schedule else [repr(keys.pop("start")), repr(keys.pop("end"))]
    if not (keys.get("warmup_epochs") or keys.get("warmup_steps")):
        keys = {key: each for key, each in keys.items() if not key.startswith("warmup")}
    arguments = without_defaults(target, part.model_extra or {})
    more = [value(arguments)] if arguments else []
    length = {key: Code(f"progress.{key}") for key in ("total_steps", "steps_per_epoch")}
    return file.call(f"optim.lr_scheduler.{kind.__name__}", *first, own, *more, **keys, **length)


def write_strategy(file: Statements) -> None:
    """Precision and strategy."""
    train = file.recipe.train
    file.section("Precision and strategy: what to compute in, and how processes share gradients.")
    settings = {"loss_scale": train.loss_scale, "keep_norms": train.keep_norms_fp32}
    make = "engine.precision.mixed.make_precision"
    file.set("precision", file.call(make, value(train.precision), "world.device", **settings))
    if train.precision in _HALF_WEIGHTS:
        file.add("master_model = precision.attach(model)", "the optimizer's weights; the model computes in float16")
        file.add(file.call("engine.precision.mixed.fit_half_weights", "optimizer"))
    if train.compile:
        file.add(file.call("core.torch_private.compile_call", "model"))
    if train.strategy.name not in _SHARDED:
        is_plain = train.strategy.name == "auto" and train.reproducible != "world"
        file.set("strategy", _strategy(file), "one process: the model as it is" if is_plain else "")


def _strategy(file: Statements) -> Code:
    part, reproducible = file.recipe.train.strategy, file.recipe.train.reproducible
    if reproducible == "world":
        return file.call("engine.strategies.deterministic.DeterministicStrategy", "model", "world")
    if part.name == "auto":
        part = part.model_copy(update={"name": "ddp"})  # which is `single` in one process
    is_exact = str(reproducible != "off")
    return file.part("train.strategy", "strategy", part, model="model", world="world", is_exact=is_exact)


def write_run(file: Statements) -> None:
    """The state, and the run, which `build` returns."""
    file.section("What a checkpoint holds; everything else is built again when a run continues.")
    file.set("state", _state(file))
    recipe, store = file.recipe, file.run.store
    named: dict[str, Any] = {"name": recipe.name, "out": Code("out"), "seed": Code("SEED")}
    named |= {name: Code(name) for name in ("world", "task", "model", "state", "scheduler", "train_loader", "batches")}
    evaluate = {key: getattr(recipe.evaluate, key) for key in ("batch_size", "num_workers", "threads")}
    named["evaluations"] = {
        split: file.call("engine.run.make_evaluation_set", f"{variable_of(split)}_loader", "world", **evaluate)
        for split in file.run.evaluations
    }
    epoch = "progress.steps_per_epoch"
    intervals = {"evaluate": _steps(recipe.evaluate) or epoch, "log": _steps(recipe.logging) or "20"}
    intervals["save"] = _steps(recipe.checkpoint) or epoch
    named["intervals"] = file.call("engine.run.Intervals", **{name: Code(each) for name, each in intervals.items()})
    kept = {key: getattr(store, key) for key in ("keep_last", "best", "direction", "keep_every")}
    named["store"] = file.call("checkpoint.store.Store", 'out / "checkpoints"', **kept)
    named["clip_gradients"] = _clip(file)
    if recipe.model.freeze or recipe.model.unfreeze:
        named["freezing"] = Code("freezing")
    if changes := without_defaults(LRChangeLog, {"ratio": recipe.logging.lr_change_ratio}):
        named["lr_changes"] = file.call("optim.lr_scheduler.LRChangeLog", **changes)
    settings = {each.name: getattr(file.run, each.name) for each in fields(Run)}
    named |= {
        name: each for name, each in settings.items() if name not in named and isinstance(each, int | float | str)
    }
    named["info"] = _info(file)
    file.add(file.call("engine.run.Run", **named).after("return "))


def _state(file: Statements) -> Code:
    train = file.recipe.train
    layout = None if train.channels_last == "auto" else train.channels_last
    choices = ("threads", "micro_batch_size", "world.size")
    named: dict[str, Any] = {
        "model": Code("master_model" if train.precision in _HALF_WEIGHTS else "model"),
        **{name: Code(name) for name in ("optimizer", "progress", "strategy", "precision")},
        "choices": file.call("engine.state.Choices", *choices, channels_last=layout),
    }
    if train.on_nonfinite != "stop":
        named["finite_check"] = file.call("engine.nonfinite.FiniteCheck", value(train.on_nonfinite))
    if train.averaging.name != "none":
        length = {key: f"progress.{key}" for key in ("total_steps", "steps_per_epoch")}
        named["averaging"] = file.part("train.averaging", "averaging", train.averaging, **length)
    if parts := file.builder.parts:
        losses = {name: f"losses[{value(name.removeprefix('loss '))}]" for name in parts}
        named["parts"] = {name: Code("task" if name == "task" else losses[name]) for name in parts}
    return file.call("engine.state.RunState", **named)


def _clip(file: Statements) -> Code | None:
    """The gradient clipping, if there is any."""
    train = file.recipe.train
    for name, limit in {"ClipGradNorm": train.clip_grad_norm, "ClipGradValue": train.clip_grad_value}.items():
        if limit is not None:
            return file.call(f"optim.clipping.{name}", value(limit), "strategy.norm_across")
    if train.adaptive_clip is None:
        return None
    heads = file.call("models.surgery.head_parameters", "model")
    return file.call("optim.clipping.AdaptiveClip", value(train.adaptive_clip), skip=heads)


def _info(file: Statements) -> Code:
    info, usual = vars(file.run.info), vars(RunInfo())
    named = {key: each for key, each in info.items() if each != usual[key] and key not in _OF_RECIPES}
    if file.recipe.model.weights is not None:
        named["origin_of_weights"] = Code("report.summary()")
    return file.call("engine.run.RunInfo", **named)


def _steps(section: Any, word: str = "every") -> str:
    """A duration in steps as an expression; empty for none."""
    epochs, steps = getattr(section, f"{word}_epochs"), getattr(section, f"{word}_steps")
    if steps is not None or epochs is None:
        return "" if steps is None else str(steps)
    text = "progress.steps_per_epoch" if epochs == 1 else f"{epochs:g} * progress.steps_per_epoch"
    return f"round({text})" if word == "at" else text
