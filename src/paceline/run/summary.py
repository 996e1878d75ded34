"""The lines that a run prints at its start and end."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from paceline.core.text import format_metric, pluralize
from paceline.engine.run import Run
from paceline.loggers.console import LINE_WIDTH
from paceline.loggers.messages import duration
from paceline.loggers.tables import metrics_tables, table_lines, terminal_width
from paceline.metrics.metric import is_higher_better
from paceline.report.history import expectations, reached_metrics
from paceline.run.directory import command_line


def opening_lines(run: Run) -> list[str]:
    """The lines before the first step: model, data, batch and learning rate."""
    splits = ", ".join(f"{len(each.loader.dataset):,} {split}" for split, each in run.evaluations.items())
    data = f"{len(run.train_loader.dataset):,} train" + (f", {splits}" if splits else "")
    return [
        f"model    {run.info.model}, {_parameters(run)}",
        f"data     {data}; {_readers(run)}",
        *(f"         {note}" for note in run.info.notes),
        *_computing(run),
        *derivation(run),
    ]


def _parameters(run: Run) -> str:
    """How many parameters the model has, and how many of them learn at the step that the run stands at."""
    parameters = list(run.model.parameters())
    total = sum(each.numel() for each in parameters)
    frozen = sum(each.numel() for each in parameters if not each.requires_grad)
    learning = f": {total - frozen:,} trainable, {frozen:,} frozen" if frozen else ", all trainable"
    return pluralize(total, "parameter") + learning


def _readers(run: Run) -> str:
    kind, workers = run.batches.kind, run.batches.workers
    if workers == 0 or kind == "memory":
        return "loaded in this process"
    if kind == "dali":
        return "loaded by DALI"
    reader = {"thread": "thread", "process": "worker process"}.get(kind, "reader")
    return f"a {reader} for each core" if workers is None else pluralize(workers, reader)


def _computing(run: Run) -> list[str]:
    """Strategy, precision and activation checkpointing, where they are not the default."""
    lines = []
    if run.world.size > 1 or run.strategy.name != "single":
        lines.append(f"strategy {run.strategy.describe()}; {pluralize(run.state.choices.threads, 'thread')} each")
    if run.info.precision != "fp32":
        lines.append(f"dtype    {run.precision.describe()}")
    if run.precision.warning:
        lines.append(f"warning: {run.precision.warning}")
    if run.info.checkpointed_blocks:
        blocks = pluralize(run.info.checkpointed_blocks, "block")
        lines.append(f"memory   activation checkpointing of {blocks}")
    return lines


def derivation(run: Run) -> list[str]:
    """How a step is divided and where the learning rate comes from."""
    sampler, progress = run.batches.sampler, run.progress
    slices = sampler.slices(0)
    samples = slices[-1].stop - slices[0].start
    sizes = sorted({cut.stop - cut.start for cut in slices}, reverse=True)
    number = pluralize(len(slices), "micro-batch")
    micro = " or ".join(str(size) for size in sizes)
    last = sampler.size - (sampler.steps_per_epoch - 1) * sampler.batch
    ends = (
        [f"         the last step of an epoch has {last}"] if 0 < last < sampler.batch and not sampler.drop_last else []
    )
    processes = pluralize(run.world.size, "process")
    return [
        f"batch    a step of {pluralize(samples, 'sample')} = {number} of {micro}, on {processes}",
        *ends,
        f"steps    {progress.steps_per_epoch} per epoch, {progress.total_steps} in total",
        f"lr       {run.info.lr or format(run.scheduler.lr.lr, 'g')}",
    ]


def closing_lines(run: Run, seconds: float) -> list[str]:
    """The closing lines: metrics, expectations and where everything is."""
    lines = [f"{pluralize(run.progress.step, 'step')}, {pluralize(run.progress.epoch, 'epoch')}, {duration(seconds)}"]
    if rows := _last_and_best(run):
        width = min(LINE_WIDTH, terminal_width(sys.stderr) or LINE_WIDTH) - 2
        for table in metrics_tables(rows, run.store.best):
            lines += table_lines(*table, width=width)
    lines += expectation_lines(run)
    places = {
        "checkpoints": run.out / "checkpoints",
        "best": run.out / "best",
        "metrics": run.out / "metrics.jsonl",
        "tensorboard": run.out / "tensorboard",
        "images": run.out / "images",
        "predictions": run.out / "predictions",
        "recipe": run.out / "recipe.yaml",
        "report": run.out / "report.html",
    }
    lines += [f"{name:<12} {path}" for name, path in places.items() if path.exists()]
    return [*lines, f"evaluate it with: {command_line('eval', run.out)}"] if run.info.recipe_yaml else lines


def _last_and_best(run: Run) -> dict[str, Mapping[str, float]]:
    """The metrics of each split, those of the last step on val beside those of the best checkpoint."""
    rows: dict[str, Mapping[str, float]] = {}
    kept = run.store.index() if run.world.is_main and "val" in run.state.metrics else []
    best = next((each for each in kept if each["best"]), None)
    for split, metrics in run.state.metrics.items():
        if split != "val" or best is None:
            rows[split] = metrics
        elif best["step"] == run.state.evaluated_step:
            rows["val, last and best"] = metrics
        else:
            rows |= {"val, last": metrics, f"val, best (step {best['step']})": best["metrics"]}
    return rows


def expectation_lines(run: Run) -> list[str]:
    """Compare each expected metric with the result."""
    metrics, lines = run.state.metrics, []
    for each in expectations(run.info.expect, metrics, expected_directions(run)):
        line = f"expected     {each['metric']} {each['expected']:g}:"
        if each["reached"] is None:
            lines.append(f"{line} no such metric; there are {', '.join(reached_metrics(metrics))}")
        else:
            reached = "reached" if each["is_met"] else "NOT reached"
            lines.append(f"{line} {reached} with {format_metric(each['reached'])}")
    return lines


def expected_directions(run: Run) -> dict[str, bool | None]:
    """Whether a higher value of each expected metric is better."""
    return {name: is_higher_better(name.rpartition(".")[2], run.task.metrics()) for name in run.info.expect}
