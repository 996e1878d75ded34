"""What a run says of itself at its beginning and at its end."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.counting import counted, shown
from paceline.engine.run import Run
from paceline.metrics.state import is_lower_better
from paceline.observe.wording import duration
from paceline.recipe.build import Builder


def opening_lines(builder: Builder, run: Run) -> list[str]:
    """The model, the data and the derivation of the batch, before the first step."""
    recipe = builder.recipe
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    splits = ", ".join(f"{len(each.source.dataset):,} {split}" for split, each in run.evaluations.items())
    data = f"{len(run.source.dataset):,} train" + (f", {splits}" if splits else "")
    return [
        f"model    {recipe.model.name}, {counted(num_parameters, 'parameter')}",
        f"data     {data}; {_readers(run)}",
        *(f"         {note}" for note in builder.notes),
        *_computing(builder, run),
        *derivation(builder, run),
    ]


def _readers(run: Run) -> str:
    kind, workers = run.batches.kind, run.batches.workers
    if workers == 0 or kind == "memory":
        return "read in this process"
    if kind == "dali":
        return "read by DALI"
    if workers is None:
        kinds = {"thread": "threads", "process": "worker processes"}.get(kind, "threads or processes")
        return f"{kinds}, as many as are found useful"
    return counted(workers, {"thread": "thread", "process": "worker process"}.get(kind, "reader"))


def _computing(builder: Builder, run: Run) -> list[str]:
    """How processes share the work and in which numbers it is done, as far as that is not the plainest way."""
    train, lines = builder.recipe.train, []
    if run.mesh.world > 1 or run.parallel.name != "single":
        lines.append(f"sharing  {run.parallel.describe()}; {counted(run.threads, 'thread')} each")
    if train.precision != "fp32":
        lines.append(f"numbers  {run.precision.describe()}")
    if run.precision.warning:
        lines.append(f"warning: {run.precision.warning}")
    if builder.recomputed:
        blocks = counted(len(builder.recomputed), "block")
        lines.append(f"memory   activations of {blocks} are computed again in the backward pass")
    return lines


def derivation(builder: Builder, run: Run) -> list[str]:
    """How an update is put together and where the learning rate comes from (the batch contract)."""
    recipe, updates, progress = builder.recipe, run.batches.updates, run.progress
    cuts = updates.cuts(0)
    samples = cuts[-1].stop - cuts[0].start
    sizes = sorted({cut.stop - cut.start for cut in cuts}, reverse=True)
    number = counted(len(cuts), "micro-batch")
    micro = " or ".join(str(size) for size in sizes)
    last = updates.size - (updates.steps_per_epoch - 1) * updates.batch
    ends = f"; the last of an epoch has {last}" if 0 < last < updates.batch and not updates.drop_last else ""
    processes = counted(run.mesh.world, "process")
    lr = f"{builder.lr():g}"
    if recipe.optimizer.reference_batch:
        ratio = f"{recipe.data.batch} / {recipe.optimizer.reference_batch}"
        ratio = ratio if recipe.optimizer.lr_rule == "linear" else f"√({ratio})"
        lr += f" = {recipe.optimizer.lr:g} × {ratio} (reference_batch)"
    return [
        f"batch    an update of {counted(samples, 'sample')} = {number} of {micro}, on {processes}{ends}",
        f"steps    {progress.steps_per_epoch} an epoch, {progress.total_steps} in all",
        f"lr       {lr}",
    ]


def closing_lines(run: Run, expect: Mapping[str, float], seconds: float) -> list[str]:
    """What came out, and where everything is."""
    lines = [f"{counted(run.progress.step, 'step')}, {counted(run.progress.epoch, 'epoch')}, {duration(seconds)}"]
    for split, figures in run.figures.items():
        told = ", ".join(f"{name} {shown(value)}" for name, value in figures.items())
        lines.append(f"{split:<12} {told}")
    lines += expectations(run, expect)
    places = {
        "checkpoints": run.out / "checkpoints",
        "best": run.out / "best",
        "metrics": run.out / "metrics.jsonl",
        "tensorboard": run.out / "tensorboard",
        "pictures": run.out / "pictures",
        "predictions": run.out / "predictions",
        "recipe": run.out / "recipe.yaml",
    }
    lines += [f"{name:<12} {path}" for name, path in places.items() if path.exists()]
    return [*lines, f"measure it again with: paceline eval {run.out}"]


def expectations(run: Run, expect: Mapping[str, float]) -> list[str]:
    """Each figure that the recipe expects beside the one that was reached."""
    reached = run.figures.get("test") or run.figures.get("val") or {}
    losses = [loss["name"] for loss in run.recipe["losses"]]
    lines = []
    for name, value in expect.items():
        if name not in reached:
            lines.append(f"expected     {name} {value:g}: no such figure; there are {', '.join(reached)}")
            continue
        is_met = reached[name] <= value if is_lower_better(name, losses) else reached[name] >= value
        lines.append(
            f"expected     {name} {value:g}: {'reached' if is_met else 'NOT reached'} with {shown(reached[name])}"
        )
    return lines
