"""Two processes: how fast they train and start, and what sharding saves in each of them."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.contest import LR, MEAN, STD, WEIGHT_DECAY
from benchmarks.measuring import Measured, Turn, interleave, spread
from benchmarks.processes import PACELINE
from benchmarks.report import Goal, Section, at_least, at_most

LEAST_SPEED, MOST_START, MOST_BYTES = 0.98, 1.20, 0.55
_TURN = 20  # steps, after which the other has its turn; ours logs once in each
_WIDTHS, _BATCH = [32, 64, 128], 64
_CASE = {
    "widths": _WIDTHS,
    "batch": _BATCH,
    "lr": LR,
    "weight_decay": WEIGHT_DECAY,
    "mean": MEAN,
    "std": STD,
}
_SCRIPTS = Path(__file__).parent / "two_processes"
_OURS, _BY_HAND = "paceline train --procs 2", "torchrun, hand-written DDP"


def measure(is_quick: bool) -> Section:
    """Seconds a step and to the end of the first, and bytes of parameters and optimizer state in a process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = _write_recipe(folder, _TURN)
        start = interleave(_starts(recipe), 2 if is_quick else 7)
        speed = _take_turns(folder, 4 if is_quick else 30)
        held = {strategy: _weigh(recipe, strategy) for strategy in ("ddp", "fsdp", "zero")}
    return Section(
        "Two processes",
        "`paceline train --procs 2` and a torchrun script, both with two processes of one thread: the model of"
        f" quickstart, {_BATCH} samples per step indexed from memory and normalized, fused AdamW, a cosine schedule,"
        f" deterministic algorithms, no buffer broadcast. Paceline logs every {_TURN} steps to files and TensorBoard"
        f" and checks every gradient; the script does neither. Speed: the two loops take turns of {_TURN} steps in the"
        f" same processes ({len(speed[_OURS].costs)} turns each after two warm-up turns), because two runs of one"
        " program differ by more than the effect. Start: from before the command to the end of rank 0's first optimizer"
        f" step, in new processes ({len(start[_OURS].costs)} rounds). Bytes: of the larger process; parameters and"
        " AdamW's state, all floating-point tensors between two steps, and the peak within a step.",
        ["what", "contestant", "metric", "ratio", "middle half"],
        [*_speed_rows(speed), *_start_rows(start), *_byte_rows(held)],
        _goals(speed, start, held),
    )


def _write_recipe(folder: Path, num_steps: int) -> Path:
    normalize = {"name": "normalize", "mean": [MEAN], "std": [STD]}
    splits = {"train": "train", "val": "test"}
    recipe = {
        "name": "two_processes",
        "task": "classification",
        "model": {"name": "convnet", "widths": _WIDTHS},
        "data": {
            "batch_size": _BATCH,
            "drop_last": True,
            **{
                name: {"dataset": "fashion_small", "split": split, "transforms": [normalize]}
                for name, split in splits.items()
            },
        },
        "losses": [{"name": "cross_entropy"}],
        "optimizer": {"name": "adamw", "lr": LR, "weight_decay": WEIGHT_DECAY},
        "schedule": {"decay": "cosine"},
        "train": {"steps": num_steps},
        "evaluate": {"every_steps": num_steps},
        "checkpoint": {"every_steps": num_steps},
        "logging": {"every_steps": _TURN},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def _starts(recipe: Path) -> dict[str, Turn]:
    """Seconds from before each contestant's command to the end of its first step."""
    out, notes = recipe.with_name("run"), recipe.with_name("notes.json")

    def by_hand() -> list[str]:
        port: int = get_free_port()  # type: ignore[no-untyped-call]
        torchrun = [str(PACELINE.with_name("torchrun")), "--nproc-per-node", "2", "--master-port", str(port)]
        return [*torchrun, "ddp_by_hand.py", json.dumps(_CASE | {"steps": _TURN})]

    def turn(command: Callable[[], list[str]]) -> Turn:
        def take() -> float:
            notes.unlink(missing_ok=True)
            shutil.rmtree(out, ignore_errors=True)
            words = command()
            begin = perf_counter()
            _run(words, {"NOTES": str(notes)})
            end: float = json.loads(notes.read_text(encoding="utf-8"))
            return end - begin

        return take

    return {_BY_HAND: turn(by_hand), _OURS: turn(lambda: _train(recipe, out, "noting"))}


def _take_turns(folder: Path, num_turns: int) -> dict[str, Measured]:
    """Seconds a step of both loops, turn by turn in one run."""
    num_steps = (num_turns + 3) * _TURN  # two turns do not count, and the last one of ours ends with the run
    recipe, notes = _write_recipe(folder, num_steps), folder / "notes.json"
    case = json.dumps(_CASE | {"steps": num_steps})
    _run(_train(recipe, folder / "turns", "taking_turns"), {"NOTES": str(notes), "TURN": str(_TURN), "CASE": case})
    seconds = json.loads(notes.read_text(encoding="utf-8"))
    return {
        name: Measured(name, [turn / _TURN for turn in seconds[key][:num_turns]])
        for name, key in ((_BY_HAND, "by_hand"), (_OURS, "ours"))
    }


def _train(recipe: Path, out: Path, plugin: str) -> list[str]:
    options = ["--procs", "2", "--out", str(out), "--use", plugin, "--restarts", "0"]
    return [str(PACELINE), "train", str(recipe), *options]


def _weigh(recipe: Path, strategy: str) -> dict[str, int]:
    printed = _run([sys.executable, "weigh.py", str(recipe), strategy], {})
    metrics: dict[str, int] = json.loads(printed.splitlines()[-1])
    return metrics


def _run(command: list[str], variables: Mapping[str, str]) -> str:
    # An installed package has its bytecode beside it; this one has from the first round on, which is thrown away.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", **variables}
    done = subprocess.run(command, cwd=_SCRIPTS, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def _speed_rows(measured: Mapping[str, Measured]) -> list[list[str]]:
    by_hand, ours = measured[_BY_HAND], measured[_OURS]
    ratios = by_hand.ratios(ours)  # of seconds, so the reverse is that of samples a second
    metrics = {each.name: f"{_BATCH / each.median:.0f}" for each in (by_hand, ours)}
    return [
        ["samples a second", _BY_HAND, metrics[_BY_HAND], "1.00", ""],
        ["samples a second", _OURS, metrics[_OURS], f"{statistics.median(ratios):.3f}", spread(ratios)],
    ]


def _start_rows(measured: Mapping[str, Measured]) -> list[list[str]]:
    by_hand, ours = measured[_BY_HAND], measured[_OURS]
    ratios = ours.ratios(by_hand)
    return [
        ["seconds to the first step", _BY_HAND, f"{by_hand.median:.2f}", "1.00", ""],
        ["seconds to the first step", _OURS, f"{ours.median:.2f}", f"{statistics.median(ratios):.2f}", spread(ratios)],
    ]


def _byte_rows(held: Mapping[str, dict[str, int]]) -> list[list[str]]:
    titles = {
        "held": "parameters + optimizer, kB",
        "at_rest": "alive between steps, kB",
        "peak": "peak of a step, kB",
    }
    return [
        [title, strategy, f"{metrics[key] / 1e3:.0f}", f"{metrics[key] / held['ddp'][key]:.3f}", ""]
        for key, title in titles.items()
        for strategy, metrics in held.items()
    ]


def _goals(
    speed: Mapping[str, Measured], start: Mapping[str, Measured], held: Mapping[str, dict[str, int]]
) -> list[Goal]:
    faster = statistics.median(speed[_BY_HAND].ratios(speed[_OURS]))
    slower = statistics.median(start[_OURS].ratios(start[_BY_HAND]))
    parts = {strategy: held[strategy]["held"] / held["ddp"]["held"] for strategy in ("fsdp", "zero")}
    return [
        at_least("samples a second, of hand-written DDP's", faster, LEAST_SPEED, "{:.3f}"),
        at_most("first step, of that of torchrun with a bare script", slower, MOST_START),
        *(
            at_most(f"parameters and optimizer state of {strategy}, of ddp's", part, MOST_BYTES, "{:.3f}")
            for strategy, part in parts.items()
        ),
    ]
