"""A bundle that reproduces one step: the weights before it, this process's micro-batches, and the recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.files import TensorFile, read_tensors, write_file
from paceline.core.errors import CheckpointError
from paceline.data.batch import Batch
from paceline.data.loader import MicroBatch, StepBatch
from paceline.engine.loss_accumulator import WeightedLoss
from paceline.engine.nonfinite import find_nonfinite
from paceline.engine.run import Run
from paceline.engine.step import forward
from paceline.losses.loss_term import AnyTerm

_MODEL, _RECIPE = "model.safetensors", "recipe.json"


def explain_nonfinite(run: Run, step_batch: StepBatch) -> str:
    """What is not finite in this rank's part of a step, in one sentence."""

    def run_pass(micro: MicroBatch) -> Mapping[str, AnyTerm]:
        terms = forward(run, micro)
        run.precision.backward([WeightedLoss(terms[name].numerator, 1.0) for name in run.task.weights])
        return terms

    with run.strategy.alone(), run.strategy.unchanged():
        found = find_nonfinite(run.model, step_batch.micro_batches, run_pass)
    for parameter in run.model.parameters():
        parameter.grad = None
    return found


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
