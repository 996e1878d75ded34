"""Build what trains the model of a recipe: precision, strategy, optimizer, clipping, schedules and averaging."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import RecipeError
from paceline.core.intervals import Progress, to_steps
from paceline.core.torch_private import compile_call
from paceline.engine.precision.mixed import Precision, make_precision
from paceline.engine.strategies.deterministic import DeterministicStrategy
from paceline.engine.strategies.single import SingleStrategy
from paceline.models.freezing import Freezing
from paceline.models.surgery import find_heads, head_parameters
from paceline.optim.averaging import Averaging
from paceline.optim.clipping import AdaptiveClip, Clip, ClipGradNorm, ClipGradValue
from paceline.optim.group_presets import PRESETS, Preset, Rule, Settings, combine
from paceline.optim.layer_decay import find_layers
from paceline.optim.lr_scheduler import Schedule, Scheduler, Transition
from paceline.optim.optimizers import add_trust_ratio, make_optimizer
from paceline.optim.param_groups import Group, RulesError, build_groups
from paceline.recipe.build_context import BuildContext, resolve
from paceline.recipe.schema import OptimizerPart, SchedulePart, TransitionPart


def checkpoint_activations(context: BuildContext, model: nn.Module) -> list[str]:
    """Apply activation checkpointing and return the names of its blocks."""
    part = context.recipe.train.activation_checkpointing
    with context.error_context("train.activation_checkpointing"):
        names: list[str] = context.make("activation_checkpointing", part.name, part).apply(model)
    return names


def choose_precision(context: BuildContext) -> Precision:
    """The precision of the run."""
    train = context.recipe.train
    with context.error_context("train.precision"):
        return make_precision(train.precision, context.world.device, train.loss_scale, train.keep_norms_fp32)


def shard(context: BuildContext, model: nn.Module) -> SingleStrategy | None:
    """Shard the parameters, for strategies that do, before the optimizer is built."""
    return _strategy(context, model) if context.recipe.train.strategy.name in ("fsdp", "zero") else None


def wrap(context: BuildContext, model: nn.Module) -> SingleStrategy:
    """Wrap the model, for strategies that replicate, after the optimizer is built."""
    train = context.recipe.train
    if train.compile:
        compile_call(model)
    if train.reproducible == "world":
        return DeterministicStrategy(model, context.world)
    return _strategy(context, model)


def _strategy(context: BuildContext, model: nn.Module) -> SingleStrategy:
    part, world = context.recipe.train.strategy, context.world
    name = part.name
    if name in ("single", "dp") and world.size > 1:
        message = f"{name} needs one process, got {world.size}; use ddp, or --procs 1"
        raise RecipeError(f"{context.checked.locate('train.strategy')}: {message}")
    is_exact = context.recipe.train.reproducible != "off"
    with context.error_context("train.strategy"):
        made: SingleStrategy = context.make("strategy", name, part, model=model, world=world, is_exact=is_exact)
    return made


def effective_lr(context: BuildContext) -> float:
    """The learning rate at `data.batch_size`, scaled from `base_batch_size`."""
    optimizer, batch = context.recipe.optimizer, context.recipe.data.batch_size
    ratio = batch / (optimizer.base_batch_size or batch)
    return optimizer.lr * (ratio if optimizer.lr_scaling == "linear" else math.sqrt(ratio))


def make_freezing(context: BuildContext, model: nn.Module, progress: Progress) -> Freezing:
    """What is frozen, and until when."""
    part = context.recipe.model
    stages = [
        (round(to_steps(stage.at_epochs, stage.at_steps, progress.steps_per_epoch, 0)), stage.match)
        for stage in part.unfreeze
    ]
    for index, (step, _) in enumerate(stages):
        if step >= progress.total_steps:
            message = f"expected a step before the end of the run ({progress.total_steps}), got {step}"
            raise RecipeError(f"{context.checked.locate(f'model.unfreeze.{index}')}: {message}")
    with context.error_context("model"):
        return Freezing(model, part.freeze, stages)


def group_settings(part: OptimizerPart) -> Preset:
    """The kinds, rules and exceptions of `param_groups`: presets, then kinds, then names."""
    presets = [PRESETS[each.preset] for each in part.param_groups if each.preset]
    kinds = [each for each in part.param_groups if each.kind is not None and each.match is None]
    own = Preset(
        kinds={each.kind: Settings(each.lr_scale, each.weight_decay) for each in kinds if each.kind},
        rules=tuple(
            Rule(each.match, each.kind, 1.0 if each.lr_scale is None else each.lr_scale, each.weight_decay)
            for each in part.param_groups
            if each.match is not None
        ),
    )
    return combine(*presets, own)


def make_groups(context: BuildContext, model: nn.Module) -> list[Group]:
    """The parameter groups."""
    part = context.recipe.optimizer
    wanted = group_settings(part)
    try:
        return build_groups(
            model,
            part.weight_decay,
            wanted.kinds,
            wanted.rules,
            find_layers(model, part.layer_map) if part.layer_map and part.layer_decay else None,
            part.layer_decay,
            wanted.no_decay_1d,
            wanted.use_no_weight_decay,
        )
    except RulesError as error:
        groups = list(enumerate(part.param_groups))
        entries = [index for index, each in groups if each.preset for _ in PRESETS[each.preset].rules]
        entries += [index for index, each in groups if each.match is not None]
        keys = [f"optimizer.param_groups.{entries[number]}" for number, _ in error.problems]
        lines = [f"{context.checked.locate(key)}: {text}" for key, (_, text) in zip(keys, error.problems, strict=True)]
        raise RecipeError(lines) from error


def optimizer_arguments(part: OptimizerPart, model: nn.Module) -> dict[str, Any]:
    """The optimizer's own arguments; muon is meant for hidden layers, so AdamW takes the head too."""
    arguments = dict(part.model_extra or {})
    if part.name == "muon":
        arguments["adamw"] = [*arguments["adamw"], *find_heads(model)]
    return arguments


def build_optimizer(context: BuildContext, model: nn.Module, freezing: Freezing, progress: Progress) -> Optimizer:
    """The optimizer over everything that is ever trained; frozen parameters get no state."""
    part, lr = context.recipe.optimizer, effective_lr(context)
    freezing.apply(progress.total_steps)
    with context.error_context("optimizer"):
        groups = [group.as_optimizer_group(lr) for group in make_groups(context, model)]
        arguments = optimizer_arguments(part, model)
        optimizer = make_optimizer(resolve("optimizer", part.name), groups, lr, part.weight_decay, arguments)
    freezing.apply(0)
    if part.trust_ratio is not None:
        add_trust_ratio(optimizer, **part.trust_ratio.model_dump())
    return optimizer


def make_clip(context: BuildContext, model: nn.Module, strategy: SingleStrategy) -> Clip | None:
    """The gradient clipping; None for none."""
    train = context.recipe.train
    if train.clip_grad_norm is not None:
        return ClipGradNorm(train.clip_grad_norm, strategy.norm_across)
    if train.clip_grad_value is not None:
        return ClipGradValue(train.clip_grad_value, strategy.norm_across)
    if train.adaptive_clip is not None:
        return AdaptiveClip(train.adaptive_clip, skip=head_parameters(model))
    return None


def make_averaging(context: BuildContext, progress: Progress) -> Averaging:
    """The weight averaging."""
    part = context.recipe.train.averaging
    supplied = {"total_steps": progress.total_steps, "steps_per_epoch": progress.steps_per_epoch}
    with context.error_context("train.averaging"):
        averaging: Averaging = context.make("averaging", part.name, part, **supplied)
    return averaging


def make_scheduler(context: BuildContext, optimizer: Optimizer, progress: Progress) -> Scheduler:
    """The schedules of learning rate, momentum and weight decay."""
    part = context.recipe.schedule
    with context.error_context("schedule"):
        lr = Schedule(effective_lr(context), **_schedule_arguments(part, progress))
        transitions = {}
        for key, transition in (("momentum", part.momentum), ("weight_decay", part.weight_decay)):
            if transition is not None:
                with context.error_context(f"schedule.{key}"):
                    transitions[key] = Transition(**_schedule_arguments(transition, progress))
        return Scheduler(optimizer, lr, **transitions)


def _schedule_arguments(part: SchedulePart | TransitionPart, progress: Progress) -> dict[str, Any]:
    """The keys of a schedule, with its decay as an object and the length of the run."""
    own = {key: getattr(part, key) for key in type(part).model_fields.keys() - {"momentum", "weight_decay"}}
    length = {"total_steps": progress.total_steps, "steps_per_epoch": progress.steps_per_epoch}
    return {**own, **length, "decay": resolve("schedule", part.decay), "arguments": part.model_extra}
