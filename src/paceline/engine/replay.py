"""What made a gradient infinite or NaN, and a bundle that reproduces the step: weights, micro-batches and recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.files import TensorFile, read_tensors, write_file
from paceline.core.errors import CheckpointError, TrainingError
from paceline.core.text import join_first
from paceline.core.torch_private import tree_leaves
from paceline.data.batch import Batch
from paceline.data.loader import MicroBatch, StepBatch
from paceline.engine.loss_accumulator import WeightedLoss, read_columns
from paceline.engine.run import Run, StepResult
from paceline.engine.step import forward
from paceline.loggers.events import Note
from paceline.losses.loss_term import LossTerm

_MODEL, _RECIPE = "model.safetensors", "recipe.json"
Pass = Callable[[MicroBatch], Mapping[str, LossTerm]]
"""A forward and a backward pass of a micro-batch; gives its losses."""
_MAX_IDS = 8


def check_finite(run: Run, results: Sequence[StepResult]) -> list[float]:
    """The gradient norms of steps, in order, read from the device: warns of those skipped.

    Raises TrainingError if the run must stop.

    The step is loaded again to name the module and the samples. The weights are those before it, unless training
    went on from a skipped step.
    """
    [norms] = read_columns([[result.grad_norm for result in results]])
    for result, norm in zip(results, norms, strict=True):
        if math.isfinite(norm):
            run.finite_check.in_a_row = 0
            continue
        if result.overflowed is not None and result.overflowed:
            continue
        try:
            run.finite_check.report(
                norm,
                result.step,
                explain=partial(run.explain_nonfinite or explain_and_keep, run, run.batches.load_step(result.step)),
                warn=lambda text: run.logger.emit(Note(text, "warning")),
            )
        except TrainingError:
            run.progress.step = result.step + 1  # steps after it changed nothing
            raise
    return norms


def explain_nonfinite(run: Run, step_batch: StepBatch) -> str:
    """What is not finite in this rank's part of a step, in one sentence."""

    def run_pass(micro: MicroBatch) -> Mapping[str, LossTerm]:
        terms = forward(run, micro)
        run.precision.backward([WeightedLoss(terms[name].numerator, 1.0) for name in run.task.weights])
        return terms

    with run.strategy.alone(), run.strategy.unchanged():
        found = find_nonfinite(run.model, step_batch.micro_batches, run_pass)
    for parameter in run.model.parameters():
        parameter.grad = None
    return found


def find_nonfinite(model: nn.Module, micro_batches: Sequence[MicroBatch], run_pass: Pass) -> str:
    """What is not finite in this rank's part of a step, in one sentence; the passes are repeated."""
    # All of them, whatever the first says: processes may have to keep step with each other.
    found = [_first_bad_module(model, micro, run_pass) for micro in micro_batches]
    for micro, sentence in zip(micro_batches, found, strict=True):
        if sentence is not None and not micro.is_padding:
            return sentence
    named = model.named_parameters()
    bad_gradients = [name for name, each in named if each.grad is not None and not _is_finite(each.grad)]
    if bad_gradients:
        return f"outputs are finite, the gradients of {join_first(bad_gradients[::-1], 3)} are not"
    return "all values on this rank are finite"


def _first_bad_module(model: nn.Module, micro: MicroBatch, run_pass: Pass) -> str | None:
    first = [
        f"{name} of {_samples(value, micro)} is not finite before the model sees it"
        for name, value in micro.batch.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not _is_finite(value)
    ]

    def look(module: nn.Module, args: Any, output: Any, name: str) -> None:
        if not first:
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.is_floating_point() and not _is_finite(value):
                    kind = type(module).__name__
                    first.append(
                        f"{name or 'the model'} ({kind}) gives what is not finite for {_samples(value, micro)}"
                    )
                    return

    with ExitStack() as stack:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(lambda m, a, o, name=name: look(m, a, o, name))
            stack.callback(handle.remove)
        terms = run_pass(micro)
    if first:
        return first[0]
    bad = [name for name, term in terms.items() if not _is_finite(term.numerator)]
    return f"the model's outputs are finite, the loss {bad[0]} is not, for {_samples(None, micro)}" if bad else None


def _samples(value: Tensor | None, micro: MicroBatch) -> str:
    """The samples whose rows are not finite, or else all of the micro-batch."""
    ids = micro.batch.ids
    if value is not None and value.ndim and len(value) == len(ids):
        rows = ~torch.isfinite(value.reshape(len(value), -1)).all(1).cpu()
        ids = ids[rows]
    return f"sample{'s' if len(ids) > 1 else ''} {join_first(ids.tolist(), _MAX_IDS)}"


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(getattr(value, "to_local", lambda: value)()).all())


def explain_and_keep(run: Run, step_batch: StepBatch) -> str:
    """What is wrong with a step, and where its replay bundle is; every rank writes its own micro-batches."""
    finding = explain_nonfinite(run, step_batch)
    folder = run.out / "replay" / f"step-{step_batch.step + 1:08d}"  # counted as in logs and checkpoints
    model = run.state.model_state_dict()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if run.world.is_main:
            write_file(folder / _MODEL, TensorFile(model))
            write_file(folder / _RECIPE, [memoryview(json.dumps(run.state.recipe).encode())])
        _write_batches(folder / f"rank-{run.world.rank}", step_batch)
    except (OSError, TypeError) as error:
        return f"{finding} (it could not be kept for a replay: {error})"
    return f"{finding}; paceline replay {folder} does it again"


def read_step(folder: Path, rank: int) -> StepBatch:
    """The step of a bundle, as one process had it."""
    path = folder / f"rank-{rank}.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        tensors = read_tensors(path.with_suffix(".safetensors"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a replay bundle: {error}") from error
    step = about["step"] - 1
    held = [
        MicroBatch(step, micro["index"], micro["epoch"], _batch(tensors, number), micro["is_padding"])
        for number, micro in enumerate(about["micro_batches"])
    ]
    return StepBatch(step, about["num_samples"], about["num_micro_batches"], held)


def read_model(folder: Path) -> dict[str, Tensor]:
    """The weights before the step, with buffers as they were when its norm was read."""
    return read_tensors(folder / _MODEL)


def _write_batches(path: Path, step_batch: StepBatch) -> None:
    tensors: dict[str, Tensor] = {}
    for number, micro in enumerate(step_batch.micro_batches):
        for name, value in micro.batch.items():
            if isinstance(value, Tensor):
                tensors[f"{number}/{name}"] = value
    about = {
        "step": step_batch.step + 1,
        "num_samples": step_batch.num_samples,
        "num_micro_batches": step_batch.num_micro_batches,
        "micro_batches": [
            {"index": micro.index, "epoch": micro.epoch, "is_padding": micro.is_padding}
            for micro in step_batch.micro_batches
        ],
    }
    write_file(path.with_suffix(".safetensors"), TensorFile(tensors))
    write_file(path.with_suffix(".json"), [memoryview(json.dumps(about).encode())])


def _batch(tensors: dict[str, Tensor], number: int) -> Batch:
    prefix = f"{number}/"
    return Batch({name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)})
