"""`train.channels_last: auto`: both memory layouts are tried before the first step, and the faster one is kept.

The choice changes bits. So it is remembered, in every checkpoint and for this machine: the same command chooses the
same again, on any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.atomic_write import replace_file
from paceline.core.cache_folder import cache_folders, make_private
from paceline.core.regular_file import read_json
from paceline.data.loader import StepBatch
from paceline.engine.run import Run
from paceline.loggers.events import Note

_LEAST_STEPS = 100  # in a shorter run, trying takes longer than it can save
_LEAST_VALUES = 1 << 17  # of the images of a micro-batch; with fewer, other things than convolutions take the time
_ROUNDS = 3
_FASTER = 0.95
_UNKNOWN = -1.0
_FILE = "channels-last.json"
_MOST_REMEMBERED = 500


def choose_channels_last(run: Run, step_batch: StepBatch, discarded_pass: Callable[[], None]) -> None:
    """Choose the memory layout of images and weights, if it is to be measured; rank 0 decides."""
    key = _key(run, step_batch) if run.world.is_main and _is_worth_trying(run, step_batch) else None
    known = run.world.start_sum([_recall(key) if run.world.is_main else 0.0])()[0]
    if known == _UNKNOWN:
        share = _measure(run, discarded_pass)
        share = run.world.start_sum([share if run.world.is_main else 0.0])()[0]
        known = float(share < _FASTER)
        layout = "channels_last" if known else "contiguous"
        note = f"memory layout: {layout}; a step in channels_last takes {share:.2f} of the time (measured)"
        run.logger.emit(Note(note))
        if key is not None:
            _remember(key, bool(known))
    run.state.set_channels_last(bool(known))


def _is_worth_trying(run: Run, step_batch: StepBatch) -> bool:
    """Decided by the recipe and the data, never by the clock: two starts must not differ in it."""
    can_try = run.world.device.type == "cpu" and run.strategy.can_probe and run.model._compiled_call_impl is None
    convolutions = any(isinstance(module, nn.Conv2d) for module in run.model.modules())
    values = sum(image.numel() for image in step_batch.micro_batches[0].batch["image"])
    return can_try and convolutions and run.progress.total_steps >= _LEAST_STEPS and values >= _LEAST_VALUES


def _measure(run: Run, discarded_pass: Callable[[], None]) -> float:
    """The time of a pass in channels_last divided by that in the other layout; the best of several, alternating."""
    best = dict.fromkeys((False, True), float("inf"))
    with run.strategy.alone(), run.strategy.unchanged():
        for number in range(_ROUNDS + 1):
            for is_channels_last in best:
                run.state.use_channels_last(is_channels_last)
                started = time.perf_counter()
                discarded_pass()
                if number:  # the first of each takes memory and chooses kernels
                    best[is_channels_last] = min(best[is_channels_last], time.perf_counter() - started)
                for parameter in run.model.parameters():
                    parameter.grad = None
    run.state.use_channels_last(False)
    return best[True] / best[False]


def _key(run: Run, step_batch: StepBatch) -> str:
    """A key of everything that the choice depends on; the number of processes is not part of it."""
    about: list[Any] = [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        _processor(),
        run.state.choices.threads,
        run.precision.describe(),
        type(run.task).__name__,
        [[name, *parameter.shape] for name, parameter in run.model.named_parameters()],
        run.batches.sampler.micro_batch_size,
        [list(image.shape) for image in step_batch.micro_batches[0].batch["image"][:1]],
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def _recall(key: str | None) -> float:
    """The earlier choice on this machine, 1 or 0; 0 also where trying is not worthwhile."""
    if key is None:
        return 0.0
    for folder in cache_folders():
        known = read_json(folder / _FILE)
        if isinstance(known, dict) and isinstance(known.get(key), bool):
            return float(known[key])
    return _UNKNOWN


def _remember(key: str, is_channels_last: bool) -> None:
    """Store the choice for the next start, which measures again if nothing can be written."""
    for folder in cache_folders():
        with suppress(OSError):
            make_private(folder)
            known = read_json(folder / _FILE)
            known = known if isinstance(known, dict) else {}
            newest = [*known.items(), (key, is_channels_last)][-_MOST_REMEMBERED:]
            replace_file(folder / _FILE, json.dumps(dict(newest)).encode(), is_durable=False)
            return
