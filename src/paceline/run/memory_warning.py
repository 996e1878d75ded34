"""A warning before a run starts that will not fit its device, with settings that would."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from paceline.core.process import free_memory
from paceline.core.temporary import temporary_folder
from paceline.engine.evaluate import num_parallel
from paceline.launch.environment import LAUNCHED

if TYPE_CHECKING:
    from paceline.engine.run import Run

_COPIES = 4  # of the weights: themselves, gradients, and two moments of an optimizer
_PER_VALUE = 400  # bytes of activations for each byte of the input: above what most networks take
_PER_OUTPUT = 32  # and for each byte that the first convolution makes of it, in wide networks
_SECONDS = 120.0
_FLOAT = 4
_EVALUATED = 0.25  # of the activations of training, which backward passes need and evaluation frees


def memory_warning(run: Run, seconds: float = _SECONDS) -> list[str]:
    """What to tell the user if the plan says that some phase needs more memory than the device has; else nothing.

    A run that obviously fits is not planned, so that it starts as fast as ever. Other processes wait meanwhile: a plan
    that takes more `seconds` is given up.
    """
    if not run.state.recipe:  # built without one
        return []
    memory = _memory(run)
    needed = _bound(run)
    if needed is None or needed <= memory:
        return []
    print("planning memory, since this run may not fit …", file=sys.stderr, flush=True)  # it takes some seconds
    rows = _plan(run, memory, min(seconds, _SECONDS))
    if not rows or rows[0].get("fits", True):
        return []
    own, mebi = rows[0], 2**20
    text = (
        f"memory: {own['phase']} needs {own['total_bytes'] / mebi:,.0f} MiB of each device by the plan, which has"
        f" {memory / mebi:,.0f} MiB: it will probably run out of memory; {_fitting(rows)}"
    )
    return [text]


def _memory(run: Run) -> int:
    """The bytes that this run may use on its device, with what its model has already."""
    device = run.world.device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    held = sum(parameter.nbytes for parameter in run.model.parameters())
    return free_memory() // run.world.local_size + held


def _bound(run: Run) -> int | None:
    """More bytes than nearly any step or evaluation of this run needs; None if no sample can be read."""
    weights = sum(parameter.nbytes for parameter in run.model.parameters())
    with suppress(Exception):  # what is wrong with a sample is explained where it is trained on
        loader = run.train_loader
        image = loader.dataset.read(0)["image"] if loader.in_memory else loader.fetch(0, np.arange(1))["image"]
        values, sampler = int(np.prod(image.shape)), run.batches.sampler
        samples = min(sampler.micro_batch_size, -(-sampler.batch // run.world.size))
        evaluated = max((each.batch_size * num_parallel(run, each) for each in run.evaluations.values()), default=0)
        per_value = max(_PER_VALUE, round(_PER_OUTPUT * _widening(run.model)))
        return _COPIES * weights + round(per_value * _FLOAT * values * max(samples, _EVALUATED * evaluated))
    return None


def _widening(model: nn.Module) -> float:
    """How many values the first convolution makes of one; 0 without convolutions."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return module.out_channels / module.in_channels / math.prod(module.stride)
    return 0.0


def _plan(run: Run, memory: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of the plan, that of the recipe itself first; none if there is no plan."""
    with temporary_folder() as folder, suppress(subprocess.SubprocessError, OSError, ValueError):
        recipe = folder / "recipe.json"
        recipe.write_text(json.dumps(run.state.recipe), encoding="utf-8")
        options = ["--procs", str(run.world.size), "--memory", str(memory), "--json"]
        options += ["train.device=cpu"] if run.world.device.type == "cpu" else []
        command = [sys.executable, "-P", "-m", "paceline", "plan", str(recipe), *options]
        variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True, env=variables)
        rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
        return rows
    return []


def _fitting(rows: list[dict[str, Any]]) -> str:
    """The first row that fits, else the one with the largest micro-batch that does, and what else it changes."""
    planned = [row for row in rows if "fits" in row]
    possible = [row for row in planned if row["changes_to_fit"] is not None]
    if not possible:
        return "no settings that were tried fit; `paceline plan` compares others"
    best = max(possible, key=lambda row: (row["fits"], not row["fits"] and row["largest_micro_batch"]))
    own = planned[0]["settings"]
    changed = [f"{key}={value}" for key, value in best["settings"].items() if value != own[key]]
    return f"this fits: {' '.join([*changed, *best['changes_to_fit']])}"
