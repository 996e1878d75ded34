"""`paceline check`: try everything a run needs once, in a temporary folder."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import add_json, add_recipe, check_extras, print_json, read_recipe
from paceline.core.errors import CheckpointError, TrainingError
from paceline.core.text import join_first, pluralize

if TYPE_CHECKING:
    from paceline.data.batch import Batch
    from paceline.data.split_loader import SplitLoader
    from paceline.engine.run import Run

_TRIED = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Run each check; the first that fails ends the command with its own exit code."""
    checked = read_recipe(options)
    check_extras(checked)
    from paceline.engine.replay import explain_nonfinite
    from paceline.recipe.build import Builder
    from paceline.recipe.build_data import oversized_batch

    report: dict[str, Any] = {"recipe": "valid"}
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        started = time.perf_counter()
        builder = Builder(checked)
        run = builder.run(Path(folder))
        run.explain_nonfinite = explain_nonfinite  # the folder, and a replay in it, is gone at the end
        report["build_seconds"] = round(time.perf_counter() - started, 3)
        report["data"] = _try_data(run)
        report["input"], warnings = _try_input(run)
        warnings += oversized_batch(builder, len(run.train_loader.dataset))
        report["step"] = _try_step(run)
        _try_smallest(run)
        report["metrics"] = _try_metrics(run)
        report["checkpoint"] = _try_checkpoint(run)
        if unknown := _unknown_best(run, report["metrics"]):
            key = "task" if checked.recipe.checkpoint.best == "auto" else "checkpoint.best"
            warnings.append(f"{checked.locate(key)}: {unknown}")
        if warnings:
            report["warnings"] = warnings
    if options.json:
        print_json({"ok": True, **report})
        return 0
    _print(report)
    return 0


def _try_data(run: Run) -> dict[str, Any]:
    """Read and transform the first samples of each split."""
    sources = {"train": (run.train_loader, _TRIED)} | {
        split: (each.loader, each.batch_size) for split, each in run.evaluations.items()
    }
    found = {}
    for split, (source, size) in sources.items():
        batch = _first_batch(run, source, size)
        found[split] = {"samples": len(source.dataset), "image": list(batch["image"].shape[1:])}
    return found


def _try_input(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Mean and std of each split as the model gets it, from some samples, and what is suspicious about them."""
    from paceline.data.loader_profile import input_stats, input_warnings

    loaders = {"train": run.train_loader} | {split: each.loader for split, each in run.evaluations.items()}
    found = {split: input_stats(loader, range(len(loader.dataset))) for split, loader in loaders.items()}
    known = {split: stats for split, stats in found.items() if stats is not None}
    return {split: stats._asdict() | {"text": str(stats)} for split, stats in known.items()}, input_warnings(known)


def _try_step(run: Run) -> dict[str, Any]:
    """Run one training step."""
    from paceline.engine.replay import check_finite
    from paceline.engine.step import train_step

    run.freezing.train_mode(run.model)
    started = time.perf_counter()
    result = train_step(run, next(iter(run.batches)))
    check_finite(run, [result])
    seconds = time.perf_counter() - started
    _refuse_detached(run)
    losses = {name: round(value.item(), 6) for name, value in result.losses.items()}
    return {"seconds": round(seconds, 3), "grad_norm": round(float(result.grad_norm), 6), **losses}


def _refuse_detached(run: Run) -> None:
    """Raise TrainingError for a loss of a user's that has no gradient."""
    for name, loss in getattr(run.task, "loss_functions", {}).items():
        if getattr(loss, "ignores_model", False):
            cure = "compute it from the output, without detach(), .item(), torch.no_grad() or NumPy"
            raise TrainingError(f"loss {name}: has no gradient, so nothing would be learned from it; {cure}")


def _try_smallest(run: Run) -> None:
    """Run a forward pass on the smallest micro-batch of an epoch, unless the first step has one as small.

    BatchNorm after global pooling fails on a single sample, which may come only at the end of an epoch.
    """
    import torch

    from paceline.data.loader import MicroBatch
    from paceline.engine.step import forward

    sampler = run.batches.sampler
    last = min(sampler.steps_per_epoch, run.progress.total_steps) - 1
    sizes = {step: min(cut.stop - cut.start for cut in sampler.slices(step)) for step in (0, last)}
    if sizes[last] >= sizes[0]:
        return
    cut = min(sampler.slices(last), key=lambda each: each.stop - each.start)
    batch = run.train_loader.fetch(0, run.batches.order.at(0, cut.start, cut.stop))
    with torch.no_grad(), run.strategy.unchanged():
        forward(run, MicroBatch(last, cut.index, 0, batch))


def _try_metrics(run: Run) -> list[str]:
    """The names of the metrics of each split, from its first samples."""
    import torch

    from paceline.engine.evaluate import without_gradient

    names: dict[str, None] = {}
    run.model.eval()
    with without_gradient(run), run.precision.compute():
        for examined in run.evaluations.values():
            batch = _first_batch(run, examined.loader, examined.batch_size)
            predictions = run.task.predict(run.model, batch)
            for metric in run.task.metrics():
                metrics = metric.compute(metric.update(predictions, batch))
                names |= {name: None for name, value in metrics.items() if not isinstance(value, torch.Tensor)}
    return list(names)


def _unknown_best(run: Run, names: list[str]) -> str | None:
    """The problem with `checkpoint.best`, if any."""
    best = run.store.best
    if best is None or not run.evaluations or best.removeprefix("averaged_") in names:
        return None
    found = f"the first samples have no metric {best!r}, so no checkpoint may be kept as the best"
    if not names:
        return f"{found}; they have no metric at all: have they labels, or objects?"
    if best != getattr(run.task, "main_metric", None):
        return found
    from paceline.recipe.problems import near

    meant = near(best, names)
    cure = f"did you mean {meant[0]!r}?" if meant else f"expected one of {', '.join(names)}"
    return f"main_metric of {type(run.task).__name__}: {found}; {cure}"


def _first_batch(run: Run, source: SplitLoader, size: int) -> Batch:
    """The first samples, at most as many as a batch of the run: only those must have one size."""
    import numpy as np

    ids = np.arange(min(_TRIED, size, len(source.dataset)))
    return source.transform_batch(source.fetch(0, ids), 0, run.world.device)


def _try_checkpoint(run: Run) -> dict[str, Any]:
    """Write a checkpoint, read it back and compare every bit."""
    import torch

    from paceline.checkpoint.reader import open_checkpoint

    state = run.state.model_state_dict()
    saved = run.store.save(1, run.state.model_parts(), run.state.state_dict(), {})
    read = open_checkpoint(saved.path)
    for name, tensor in state.items():
        if not torch.equal(tensor.cpu(), read.model[name]):
            raise CheckpointError(f"{name} changed when it was saved and loaded")
    num_bytes = sum(path.stat().st_size for path in saved.path.iterdir())
    run.restore(read)
    return {"bytes": num_bytes}


def _print(report: dict[str, Any]) -> None:
    print(f"recipe      {report['recipe']}")
    for split, found in report["data"].items():
        shape = "×".join(str(length) for length in found["image"])
        print(f"data        {split}: {pluralize(found['samples'], 'sample')}, images {shape}")
    for split, stats in report["input"].items():
        print(f"input       {split}: {stats['text']}, as the model gets it")
    step = report["step"]
    print(f"step        loss {step['loss']:.4f}, gradient norm {step['grad_norm']:.4f}, {step['seconds']:.2f} s")
    without = "none: the recipe has no data.val" if len(report["data"]) == 1 else "none"
    print(f"metrics     {join_first(report['metrics'], 12) or without}")
    print(f"checkpoint  {report['checkpoint']['bytes'] / 2**20:.1f} MB, saved and loaded bit-identical")
    for warning in report.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    print("all good")
