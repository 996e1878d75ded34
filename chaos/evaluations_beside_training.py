"""Evaluations beside a run that saves all the time: each measures one checkpoint, and it is the one that it names."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from chaos.row import Row
from chaos.training import Command, send

_MODULE = "chaos.evaluations_beside_training"
_PROCESSES = 2
_LONGEST = 300.0
_SLOW_LOSS = """
import os, time
from paceline import register
from paceline.losses.classification import CrossEntropy


@register.loss("slow")
class Slow(CrossEntropy):
    def __call__(self, outputs, batch):
        if outputs.requires_grad:
            time.sleep(float(os.environ.get("SECONDS", "0")))
        return super().__call__(outputs, batch)
"""
# The best is measured often, so that `best` moves on too, and only the newest and the best are kept.
_WORDS = (
    *("losses=[{name: slow}]", "--use", "slow", "train.averaging=none", "data.batch_size=16"),
    *("checkpoint.every_steps=2", "evaluate.every_steps=30", "checkpoint.best=loss"),
)


def run(quick: bool) -> list[Row]:
    """Evaluations beside a run, compared with those of the same run's checkpoints, kept, once it stands still."""
    number = 4 if quick else 100
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slow.py").write_text(_SLOW_LOSS)
        answers = _beside(folder, number)
        expected = _again(folder, {answer["step"] for answer in answers if "step" in answer})
    problems = [_problem(answer, expected) for answer in answers]
    print("\n".join(problem for problem in problems if problem))
    right, steps = problems.count(None), {answer.get("step") for answer in answers}
    return [
        Row(
            f"`eval` of the best or newest checkpoint, {_PROCESSES} processes, beside a run that saves every 2 steps",
            "the metrics of the checkpoint that it names",
            f"{right}/{number}, at {len(steps)} different steps",
            right == number,
        )
    ]


def _beside(folder: Path, number: int) -> list[dict[str, Any]]:
    """What evaluations say while the run goes on."""
    os.environ["SECONDS"] = "0.05"
    training = Command(folder, "run", 1, "train.steps=1000000", "checkpoint.keep_last=1", *_WORDS)
    del os.environ["SECONDS"]
    try:
        training.wait_until((folder / "run" / "best").exists)
        answers = _evaluate_often(folder, number)
        if training.process.poll() is not None:
            raise RuntimeError(f"the run did not last: {training.output()[-500:]}")
    finally:
        send(training.process.pid, signal.SIGTERM)
        training.wait()
    return answers


def _evaluate_often(folder: Path, number: int) -> list[dict[str, Any]]:
    """The answers of as many commands, in processes that outlive each of them: most of a command is loading torch."""
    environment = {**_environment(folder), "OMP_NUM_THREADS": "1"}
    place = {"WORLD_SIZE": str(_PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # they meet by a file
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", _MODULE, "eval", str(number)],
            cwd=folder,
            env={**environment, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(_PROCESSES)
    ]
    printed = [rank.communicate(timeout=_LONGEST * number)[0] for rank in ranks]
    return [json.loads(line) for line in printed[0].splitlines()]


def _environment(folder: Path) -> dict[str, str]:
    """The variables of a process that imports from the folder, from this one and from where this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd()), *sys.path])}


def _evaluate(number: int) -> None:
    """Be one of the processes of `paceline eval`, so many times; the first one prints the answers."""
    from torch import distributed

    from paceline.cli import main

    rank = int(os.environ["RANK"])
    for turn in range(number):
        distributed.init_process_group("gloo", f"file://{Path.cwd()}/meet-{turn}", rank=rank, world_size=_PROCESSES)
        output, errors = io.StringIO(), io.StringIO()
        place = [] if turn % 2 else ["--checkpoint", "run/checkpoints"]
        with redirect_stdout(output), redirect_stderr(errors):
            code = main(["eval", "run", "--json", "--use", "slow", *place])
        if rank == 0:
            answer = json.loads(output.getvalue()) if code == 0 else {"error": errors.getvalue()[-500:]}
            print(json.dumps(answer), flush=True)


def _again(folder: Path, steps: set[int]) -> dict[int, dict[str, float]]:
    """The metrics at these steps of the same run, done again without haste or rotation, bit-identical."""
    command = Command(folder, "again", 1, f"train.steps={max(steps)}", "checkpoint.keep_every=2", *_WORDS)
    if command.process.wait() != 0:
        raise RuntimeError(f"the run could not be done again: {command.output()[-500:]}")
    script = [
        sys.executable,
        "-m",
        "chaos.evaluations_beside_training",
        "measure",
        str(folder / "again"),
        *map(str, sorted(steps)),
    ]
    done = subprocess.run(script, capture_output=True, text=True, check=True, env=_environment(folder))
    return dict(json.loads(done.stdout))


def _measure(out: Path, steps: list[int]) -> list[tuple[int, dict[str, float]]]:
    """The metrics of a run's checkpoints, in this process."""
    importlib.import_module("slow")  # registers the loss of the recipe
    from paceline.checkpoint.reader import open_checkpoint
    from paceline.engine.evaluate import evaluate_with_average
    from paceline.recipe.build import Builder
    from paceline.recipe.load import load
    from paceline.recipe.validate import validate

    run = Builder(validate(load(str(out / "recipe.yaml"))), trains=False).run(out)
    run.visualize = False
    found = []
    for step in steps:
        run.state.load_model(open_checkpoint(run.store.path_of(step)))
        found.append((step, evaluate_with_average(run, "val").metrics))
    return found


def _problem(answer: dict[str, Any], expected: dict[int, dict[str, float]]) -> str | None:
    if "error" in answer:
        return f"ended with an error: {answer['error']}"
    step, found = answer["step"], answer["metrics"]
    if Path(answer["checkpoint"]).name != f"step-{step:08d}":
        return f"step {step} was measured, and {answer['checkpoint']} named"
    return None if found == expected[step] else f"step {step}: found {found}, expected {expected[step]}"


if __name__ == "__main__":
    if sys.argv[1] == "eval":
        _evaluate(int(sys.argv[2]))
    else:
        print(json.dumps(_measure(Path(sys.argv[2]), [int(word) for word in sys.argv[3:]])))
