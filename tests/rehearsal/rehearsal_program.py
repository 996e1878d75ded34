"""Rehearses recipes on fake CUDA devices: `program.py LIBRARY CASES FOLDER`, answers as JSON, one line a case.

A program of its own, since the device must be there before torch is imported.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cuda_stub import load_stub

_EVERY = [
    "train.epochs=null", "data.num_workers=0", "evaluate.num_workers=0", "logging.tensorboard=false",
    "model.weights=null", "schedule.warmup=linear", "schedule.warmup_epochs=null", "schedule.warmup_steps=1",
]  # fmt: skip


def main(library: Path, cases: Path, folder: Path) -> None:
    """Rehearse each case; a line is what came of it."""
    load_stub(library)
    for number, case in enumerate(json.loads(cases.read_text())):
        started = time.perf_counter()
        try:
            rehearse(case, folder / str(number))
            error = ""
        except Exception as raised:  # noqa: BLE001 - whatever it is, the case failed by it
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"name": case["name"], "error": error, "seconds": time.perf_counter() - started}), flush=True)


def rehearse(case: dict[str, Any], out: Path) -> None:
    """Train, evaluate and save as the recipe says, for two steps, as the first of the case's processes."""
    from fake_cuda import fake_cuda, fake_world
    from planted_faults import planted
    from shipped_recipes import first_step

    from paceline.engine.loop import train
    from paceline.engine.run import Run
    from paceline.engine.step import train_step
    from paceline.recipe.build import Builder
    from paceline.recipe.load import load
    from paceline.recipe.validate import validate

    if case["steps"] == 1:
        with fake_cuda() as mode:
            first_step(case["recipe"], mode, out)
        return
    processes = case["processes"]
    with fake_cuda(processes) as mode, ExitStack() as stack:

        def strict_step(run: Run, step_batch: Any) -> Any:
            # DDP's reducer rebuilds its buckets before the second step, and waits for the device then.
            with mode.strict() if step_batch.step >= case["first_strict"] else nullcontext():
                return train_step(run, step_batch)

        checked = validate(load(case["recipe"], [*_EVERY, f"train.steps={case['steps']}", *case["overrides"]]))
        run = Builder(checked, fake_world(processes)).run(out)
        for fault in case["faults"]:
            stack.enter_context(planted(fault, run))
        if processes == 1:
            stack.enter_context(patch("paceline.engine.loop.train_step", strict_step))
            train(run)
        else:
            _train_as_one_of_several(run, partial(strict_step, run))


def _train_as_one_of_several(run: Any, step: Any) -> None:
    """What `train` does, but for waiting for the files of processes that are not there."""
    from paceline.engine.evaluate import evaluate_with_average

    run.freezing.train_mode(run.model)
    for step_batch in run.batches:
        step(step_batch)
    with patch("paceline.engine.evaluate.check_ledger", lambda world, ids, size: None):
        for split in run.evaluations:
            evaluate_with_average(run, split)
    run.state.model_parts()
    run.state.state_dict()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
