"""Convert Pet's `SOLVER` section: optimizer, schedule, length and precision, whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.convert.foreign_config import ForeignConfig, Keys, Numbers
from paceline.core.arguments import (
    Count,
    CountOrZero,
    Increasing,
    NonNegative,
    PartialShare,
    Positive,
    Share,
)
from paceline.recipe.schema import Epochs, Steps

_DECAYS = {"STEP": "multi_step", "COSINE": "cosine", "POLY": "poly", "STEP_COSINE": "step_cosine"}
_NOT_FOR_ADAM = ("MOMENTUM", "WEIGHT_DECAY", "BIAS_DOUBLE_LR", "BIAS_WEIGHT_DECAY", "WEIGHT_DECAY_GN")
_DEFAULTS_OF_POSE = {"LR_POLICY": "COSINE", "BIAS_DOUBLE_LR": False, "BIAS_WEIGHT_DECAY": True}


SOLVER: Keys = {
    "SOLVER.OPTIMIZER": (Literal["SGD", "RMSPROP", "ADAM"], "SGD"),
    "SOLVER.BASE_LR": (Positive, 0.001),
    "SOLVER.MOMENTUM": (PartialShare, 0.9),
    "SOLVER.WEIGHT_DECAY": (NonNegative, 5e-4),
    "SOLVER.WEIGHT_DECAY_GN": (NonNegative, 0.0),
    "SOLVER.BIAS_DOUBLE_LR": (bool, True),
    "SOLVER.BIAS_WEIGHT_DECAY": (bool, False),
    "SOLVER.LR_POLICY": (Literal["STEP", "COSINE", "POLY", "STEP_COSINE"], "STEP"),
    "SOLVER.STEPS": (Annotated[Numbers, Increasing()], []),
    "SOLVER.GAMMA": (Positive, 0.1),
    "SOLVER.LR_POW": (Positive, 0.9),
    "SOLVER.MAX_ITER": (Steps | None, None),
    "SOLVER.MAX_EPOCHS": (Epochs | None, None),
    "SOLVER.WARM_UP_METHOD": (Literal["CONSTANT", "LINEAR"], "LINEAR"),
    "SOLVER.WARM_UP_ITERS": (CountOrZero, 500),
    "SOLVER.WARM_UP_EPOCHS": (NonNegative, 5),
    "SOLVER.WARM_UP_EPOCH": (NonNegative | None, None),
    "SOLVER.WARM_UP_FACTOR": (Share, 0.1),
    "SOLVER.LOG_LR_CHANGE_THRESHOLD": (Annotated[float, Field(ge=1)] | None, None),
    "SOLVER.SNAPSHOT_ITERS": (Count | None, None),
    "SOLVER.SNAPSHOT_EPOCHS": (Count | None, None),
    "SOLVER.AMP.ENABLED": (bool | None, None),
    "SOLVER.AMP.OPT_LEVEL": (Literal["O0", "O1", "O2", "O3"], "O1"),
    "SOLVER.AMP.KEEP_BN_FP32": (bool | None, None),
    "SOLVER.AMP.LOSS_SCALE": (Positive | Literal["dynamic"] | None, None),
}
"""Pet refuses other keys too."""


def convert_solver(config: ForeignConfig, is_pose: bool) -> dict[str, Any]:
    """The sections of a recipe that the solver decides."""
    defaults = _DEFAULTS_OF_POSE if is_pose else {}
    unit, length = _length(config)
    every = {"every_steps": "SOLVER.SNAPSHOT_ITERS"} if unit == "steps" else {"every_epochs": "SOLVER.SNAPSHOT_EPOCHS"}
    return {
        "optimizer": _optimizer(config, defaults),
        "schedule": _decay(config, defaults, unit, length) | _warmup(config, unit, length),
        "train": {unit: length} | _precision(config),
        "checkpoint": config.some(**every),
        "logging": config.some(lr_change_ratio="SOLVER.LOG_LR_CHANGE_THRESHOLD"),
    }


def _length(config: ForeignConfig) -> tuple[str, int]:
    """The unit that a run counts in, and its length."""
    for key, unit in (("SOLVER.MAX_ITER", "steps"), ("SOLVER.MAX_EPOCHS", "epochs")):
        if (length := config.take(key)) is not None:
            return unit, length
    raise config.error("SOLVER", "expected MAX_ITER or MAX_EPOCHS, got neither")


def _optimizer(config: ForeignConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    name = config.take("SOLVER.OPTIMIZER")
    optimizer = {"name": name.lower(), "lr": config.take("SOLVER.BASE_LR")}
    if name == "ADAM":
        config.drop("not converted: Pet does not pass it to Adam", *(f"SOLVER.{key}" for key in _NOT_FOR_ADAM))
        return optimizer
    momentum, decay, doubles, decays, group_norm = (
        config.take(f"SOLVER.{key}", defaults.get(key)) for key in _NOT_FOR_ADAM
    )
    groups: list[dict[str, Any]] = [{"preset": "pet"}]
    if (doubles, decays, group_norm) != (True, False, 0):
        bias = {"lr_scale": 2 if doubles else 1, "weight_decay": decay if decays else 0.0}
        groups = [{"kind": "group_norm", "weight_decay": group_norm}, {"match": "*bias*"} | bias]
    return optimizer | {"momentum": momentum, "weight_decay": decay, "param_groups": groups}


def _decay(config: ForeignConfig, defaults: Mapping[str, Any], unit: str, length: int) -> dict[str, Any]:
    """Pet counts from 1, with and without warm-up."""
    policy = config.take("SOLVER.LR_POLICY", defaults.get("LR_POLICY"))
    decay = {"decay": _DECAYS[policy], "count_from": 1}
    if policy == "POLY":
        return decay | {"power": config.take("SOLVER.LR_POW")}
    if policy == "COSINE":
        return decay
    steps = config.items("SOLVER.STEPS")
    if unit == "steps" and any(isinstance(step, float) for step in steps):
        raise config.error("SOLVER.STEPS", f"expected iterations, which are whole numbers, got {steps}")
    if policy == "STEP_COSINE" and not (steps and steps[-1] < length):
        raise config.error("SOLVER.STEPS", f"expected the last one, where the cosine begins, before {length}")
    reached = [step for step in steps if step <= length]
    if reached != steps:
        config.remark("SOLVER.STEPS", f"changed: the run ends before {', '.join(map(str, steps[len(reached) :]))}")
    if not reached:
        return decay | {"decay": "constant"}
    return decay | {f"milestone_{unit}": reached, "gamma": config.take("SOLVER.GAMMA")}


def _warmup(config: ForeignConfig, unit: str, length: int) -> dict[str, Any]:
    key = "SOLVER.WARM_UP_ITERS" if unit == "steps" else "SOLVER.WARM_UP_EPOCHS"
    other = "SOLVER.WARM_UP_EPOCH"  # as projects that grew out of Pet write it
    if unit == "epochs" and config.has(other):
        if config.has(key):
            raise config.error(other, "cannot be given together with WARM_UP_EPOCHS; remove one of them")
        key = other
    if (warmup := config.take(key)) >= length:
        why = "" if config.has(key) else ", Pet's default, since it is not in the file; set it, to 0 for no warm-up"
        raise config.error(key, f"expected less than the run's {length} {unit}, got {warmup:g}{why}")
    if not warmup:
        return {"warmup": "none"}
    method, factor = config.take("SOLVER.WARM_UP_METHOD"), config.take("SOLVER.WARM_UP_FACTOR")
    if method == "CONSTANT" and not factor:
        raise config.error("SOLVER.WARM_UP_FACTOR", "expected a number > 0, since WARM_UP_METHOD is CONSTANT")
    return {"warmup": method.lower(), f"warmup_{unit}": warmup, "warmup_from": factor}


def _precision(config: ForeignConfig) -> dict[str, Any]:
    if not config.take("SOLVER.AMP.ENABLED"):
        return {}
    level = config.take("SOLVER.AMP.OPT_LEVEL")
    keep = {"keep_norms_fp32": "SOLVER.AMP.KEEP_BN_FP32"} if level in ("O2", "O3") else {}
    return {"precision": level} | config.some(**keep, loss_scale="SOLVER.AMP.LOSS_SCALE")
