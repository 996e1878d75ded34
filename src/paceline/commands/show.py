"""`paceline show`: print a resolved recipe and what follows from it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import print_json, read_recipe
from paceline.commands.run_directory import leaves, recipe_lines
from paceline.core.text import join_first

if TYPE_CHECKING:
    from paceline.engine.run import Run
    from paceline.recipe.build import Builder

_PLOTTED = 2000  # points of a curve; more cannot be seen


def main(options: argparse.Namespace) -> int:
    """Print the resolved recipe, the model, the parameter groups, the batch and the learning rate."""
    checked = read_recipe(options)
    from paceline.recipe.build import Builder

    builder = Builder(checked)
    run = builder.run(Path("runs") / checked.recipe.name)
    if options.plot:
        _plot(run, options.plot)
    if options.json:
        print_json(_as_json(run, builder))
    else:
        _print(run, builder)
    return 0


def _as_json(run: Run, builder: Builder) -> dict[str, Any]:
    rows, flops = model_table(run)
    updates, progress = run.batches.updates, run.progress
    lr = run.scheduler.lr
    base = [lr(step) for step in range(progress.total_steps)]
    groups = _groups(run)
    return {
        "recipe": run.state.recipe,
        "origins": {key: str(builder.checked.origin(key)) for key, _ in leaves(run.state.recipe)},
        "model": {"parameters": rows[0]["parameters"], "flops_per_sample": flops, "layers": rows},
        "weights": builder.fitted.as_dict() if builder.fitted else None,
        "frozen": run.freezing.frozen_at(0),
        "groups": groups,
        "schedule": {group["label"]: [value * group["lr_scale"] for value in base] for group in groups},
        "batch": {
            "global": updates.batch,
            "processes": run.world.size,
            "micro_batch_size": updates.micro_batch_size,
            "micro_batches": len(updates.slices(0)),
            "steps_per_epoch": progress.steps_per_epoch,
            "total_steps": progress.total_steps,
            "lr": lr.lr,
        },
    }


def model_table(run: Run) -> tuple[list[dict[str, Any]], int]:
    """Parameters and FLOPs per sample of the model and its modules down to level two; and the total FLOPs."""
    import numpy as np
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, depth=2)
    batch = run.train_loader.finish(run.train_loader.fetch(0, np.arange(1)), 0, run.world.device)
    run.model.eval()
    with torch.inference_mode(), counter:
        run.task.predict(run.model, batch)
    counts = {name: sum(by_kind.values()) for name, by_kind in counter.get_flop_counts().items()}
    root = type(run.model).__name__
    rows = []
    for name, module in run.model.named_modules():
        if name.count(".") <= 1:
            parameters = sum(parameter.numel() for parameter in module.parameters())
            flops = counts.get(f"{root}.{name}" if name else "Global", 0)
            rows.append({"name": name, "type": type(module).__name__, "parameters": parameters, "flops": flops})
    return rows, counter.get_total_flops()


def _groups(run: Run) -> list[dict[str, Any]]:
    """The parameter groups; repeated labels get numbers."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    labels = [group["label"] for group in run.optimizer.param_groups]
    rows = []
    for number, group in enumerate(run.optimizer.param_groups):
        label = group["label"] if labels.count(group["label"]) == 1 else f"{group['label']} #{number}"
        rows.append(
            {
                "label": label,
                "lr_scale": group["lr_scale"],
                "weight_decay": group.get("weight_decay", 0.0),
                "tensors": len(group["params"]),
                "parameters": sum(parameter.numel() for parameter in group["params"]),
                "names": [names[id(parameter)] for parameter in group["params"]],
            }
        )
    return rows


def _print(run: Run, builder: Builder) -> None:
    from paceline.commands.summary import derivation
    from paceline.visualize.curves import terminal_curve

    rows, _ = model_table(run)
    print("\n".join(recipe_lines(run.state.recipe, builder.checked)))
    print()
    shown = [row for row in rows if row["parameters"] or row["flops"]]
    _print_table(
        ("module", "type", "parameters", "MFLOPs/sample"),
        [(r["name"] or "(all)", r["type"], f"{r['parameters']:,}", f"{r['flops'] / 1e6:,.2f}") for r in shown],
    )
    for lines in (builder.fitted.summary() if builder.fitted else [], run.freezing.describe()):
        if lines:
            print("", *lines, sep="\n")
    print()
    _print_table(
        ("group", "lr ×", "weight decay", "tensors", "parameters"),
        [
            (g["label"], f"{g['lr_scale']:g}", f"{g['weight_decay']:g}", str(g["tensors"]), f"{g['parameters']:,}")
            for g in _groups(run)
        ],
        num_words=1,
    )
    print("", *derivation(builder, run), "", sep="\n")
    lr = run.scheduler.lr
    values = [lr(step) for step in range(run.progress.total_steps)]
    print("learning rate before group factors, over the run")
    print("\n".join(terminal_curve(values)))


def _plot(run: Run, path: Path) -> None:
    """Plot the learning rate of each group to a PNG file; groups with the same rate share a curve."""
    from paceline.visualize.curves import draw_curves
    from paceline.visualize.image import save_png

    total = run.progress.total_steps
    steps = sorted({total * k // _PLOTTED for k in range(_PLOTTED)} | {total - 1})
    base = [run.scheduler.lr(step) for step in steps]
    epochs = [step / run.progress.steps_per_epoch for step in steps]
    labels: dict[float, list[str]] = {}
    for group in _groups(run):
        labels.setdefault(group["lr_scale"], []).append(group["label"])
    curves = {join_first(names, 3): (epochs, [value * scale for value in base]) for scale, names in labels.items()}
    save_png(draw_curves(curves, f"{run.name}: learning rate", "epoch", "learning rate"), path)


def _print_table(header: tuple[str, ...], rows: list[tuple[str, ...]], num_words: int = 2) -> None:
    """Rows under a header: the first columns are words, the others numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, title in enumerate(header):
        table.add_column(title, justify="left" if index < num_words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=max(120, Console().width), highlight=False).print(table)
