"""Whether every precision learns as well as float32, and what memory a step then takes."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import paceline
from benchmarks.report import Goal, Section
from paceline.core.errors import TrainingError
from paceline.core.process import num_cores
from paceline.data import synthetic
from paceline.plan.memory import MemoryTracker

_PLAIN = "fp32"
_WITHIN = "within noise"
_SEEDS = (0, 1, 2)
_MEBI = 2**20
_COMMON = {"train.threads": 1, "train.channels_last": False, "logging.images": False}
_NORMALIZE = {"name": "normalize", "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}
_ONCE = {"evaluate.every_epochs": 100, "checkpoint.every_epochs": 100}  # longer than any run: once, at the end
_UNET = _ONCE | {
    "model.backbone_args": {"stem_width": 8, "channels": [8, 16, 32, 64]},
    "model.widths": [32, 16, 16, 8],
}


class Task(NamedTuple):
    """A short training of one task."""

    recipe: str
    metric: str
    epochs: int
    precisions: Sequence[str]
    changes: Mapping[str, object]


def _fashion(split: str) -> dict[str, object]:
    normalize = {"name": "normalize", "mean": [0.286], "std": [0.353]}
    masking = {"name": "random_masking", "num_patches": 16}
    return {"dataset": "fashion_small", "split": split, "transforms": [normalize, masking]}


# Most processors emulate float16, which is slow: small networks and images for all.
_TASKS = {
    "classification": Task(
        "quickstart",
        "top1",
        3,
        (_PLAIN, "bf16", "fp16", "O1", "O2", "O3"),
        {"model.widths": [8, 16], "data.batch_size": 32},
    ),
    "segmentation": Task(
        "segmentation_sample",
        "miou",
        12,
        (_PLAIN, "bf16", "fp16"),
        _UNET
        | {
            "data.train.transforms": [
                {"name": "resize", "size": [48, 64]},
                {"name": "random_horizontal_flip"},
                {"name": "random_affine", "degrees": 180, "translate": [0.1, 0.1], "mask_fill": 255},
                _NORMALIZE,
            ],
            "data.val.transforms": [{"name": "resize", "size": [48, 64]}, _NORMALIZE],
        },
    ),
    "saliency": Task(
        "saliency_sample",
        "max_f",
        12,
        (_PLAIN, "bf16", "fp16"),
        _UNET | {"data.train.transforms.0.size": [48, 48], "data.val.transforms.0.size": [48, 48]},
    ),
    "detection": Task("detection_sample", "ap50", 24, (_PLAIN, "bf16"), _ONCE),
    "keypoints": Task("keypoints_sample", "pck", 40, (_PLAIN, "bf16"), _ONCE),
    "masked_autoencoder": Task(
        "mae_fashion",
        "masked_mse",
        3,
        (_PLAIN, "bf16"),
        {"data.train": _fashion("train"), "data.val": _fashion("test")},
    ),
}


class Measured(NamedTuple):
    """A precision of a task: its metric with each seed, seconds a run, and bytes of activations."""

    values: list[float]
    seconds: float
    activations: int


def measure(is_quick: bool) -> Section:
    """Classification in each precision."""
    return compare(
        "Precisions",
        "quickstart with a model of [8, 16] channels, batch size 32, 3 epochs",
        ["classification"],
        is_quick,
    )


def compare(title: str, method: str, names: Sequence[str], is_quick: bool) -> Section:
    """Each task's metric after a short training in each precision, over seeds, and the memory of a step."""
    seeds = _SEEDS[:1] if is_quick else _SEEDS
    rows, far = [], []
    for name in names:
        task = _TASKS[name]
        epochs = 2 if is_quick else task.epochs  # one more than the warm-up takes
        with _data(name) as places:
            changes = {**_COMMON, **task.changes, **places, "train.epochs": epochs}
            found = _measure(task, changes, seeds)
        plain = found[_PLAIN]
        rows += [_row(f"{name}: {each}", task.metric, measured, plain) for each, measured in found.items()]
        far += [f"{name}: {each}" for each, (values, *_) in found.items() if _verdict(values, plain.values) != _WITHIN]
    return Section(
        title,
        f"{method}; seeds: {len(seeds)}. The metric is that of val at the end, evaluated in the same precision."
        " *Within noise*: the means differ from fp32 by at most two standard errors of the difference, or by no more"
        " than fp32 differs between seeds. A run that ends early because of an overflow counts as 0. *Activations* are"
        " the peak of live tensor bytes in a step without parameters, gradients and optimizer state, counted. This"
        " processor emulates float16. A training has one thread, and every core one training.",
        [
            *("task: precision", "metric", "mean", "least–most", "against fp32", "two standard errors", "verdict"),
            *("activations, MiB", "ratio", "seconds a run"),
        ],
        rows,
        [Goal(f"beyond noise of fp32: {', '.join(names)}", ", ".join(far) or "none", not far, "none")]
        if len(seeds) > 1
        else [],
    )


@contextmanager
def _data(name: str) -> Iterator[dict[str, object]]:
    """Where the task finds its data, as changes of its recipe; what a task needs beyond the package is drawn."""
    write = {
        "segmentation": synthetic.write_segmentation,
        "saliency": synthetic.write_saliency,
        "detection": synthetic.write_detection,
        "keypoints": synthetic.write_keypoints,
    }.get(name)
    if write is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), 64, 0)
        yield {"data.train.root": folder, "data.val.root": folder}


def _measure(task: Task, changes: dict[str, Any], seeds: Sequence[int]) -> dict[str, Measured]:
    """Each precision with each seed, a training of one thread on every core."""
    variants = {each: {**changes, "train.precision": each} for each in task.precisions}
    with ProcessPoolExecutor(num_cores(), mp_context=get_context("spawn")) as pool:
        runs = [{**each, "train.seed": seed} for each in variants.values() for seed in seeds]
        done = list(pool.map(_train, repeat(task), runs))
    found = {}
    for place, (name, each) in enumerate(variants.items()):
        own = done[place * len(seeds) : (place + 1) * len(seeds)]
        seconds = statistics.mean(took for _, took in own)
        found[name] = Measured([value for value, _ in own], seconds, _activations(task, each))
    return found


def _activations(task: Task, changes: dict[str, Any]) -> int:
    """Bytes of live tensors at their peak within the third step, without what stays from step to step."""
    run = paceline.build(task.recipe, changes)
    batches = iter(run.batches)
    for _ in range(2):
        paceline.train_step(run, next(batches))
    tracker, batch = MemoryTracker(), next(batches)
    with tracker, tracker.watch(run.model, run.optimizer):
        paceline.train_step(run, batch)
    return tracker.peak_passing


def _verdict(values: Sequence[float], plain: Sequence[float]) -> str:
    if len(values) < 2:
        return "needs more seeds"
    if 0.0 in values:  # such a value widens the noise so much that it would hide itself
        return f"{values.count(0.0)} of {len(values)} ended early"
    difference = abs(statistics.mean(values) - statistics.mean(plain))
    is_noise = difference <= max(2 * _standard_error(values, plain), max(plain) - min(plain))
    return _WITHIN if is_noise else "beyond noise"


def _standard_error(values: Sequence[float], plain: Sequence[float]) -> float:
    """Of the difference of two means."""
    if len(values) < 2:
        return float("nan")
    return sqrt(sum(statistics.variance(each) / len(each) for each in (values, plain)))


def _train(task: Task, overrides: dict[str, Any]) -> tuple[float, float]:
    """The metric at the end, 0 where numbers left the range of their format and training ended; and seconds."""
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = paceline.build(task.recipe, overrides, out=Path(folder) / "run")
        try:
            paceline.train(run)
        except TrainingError:
            return 0.0, perf_counter() - begin
        return run.state.metrics["val"][task.metric], perf_counter() - begin


def _row(name: str, metric: str, measured: Measured, plain: Measured) -> list[str]:
    values, is_plain = measured.values, measured is plain
    return [
        name,
        metric,
        f"{statistics.mean(values):.4f}",
        f"{min(values):.4f}–{max(values):.4f}",
        f"{statistics.mean(values) - statistics.mean(plain.values):+.4f}",
        "" if is_plain else f"{2 * _standard_error(values, plain.values):.4f}",
        "" if is_plain else _verdict(values, plain.values),
        f"{measured.activations / _MEBI:.1f}",
        f"{measured.activations / plain.activations:.3f}",
        f"{measured.seconds:.0f}",
    ]
