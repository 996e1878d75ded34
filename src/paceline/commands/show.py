"""`paceline show`: what a recipe amounts to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.directory import leaves, recipe_lines
from paceline.commands.opening import print_json, read_recipe

if TYPE_CHECKING:
    from paceline.engine.run import Run


def main(options: argparse.Namespace) -> int:
    """Print the resolved recipe, the model and the batch."""
    checked = read_recipe(options)
    from paceline.commands.summary import derivation
    from paceline.recipe.build import Builder

    builder = Builder(checked)
    run = builder.run(Path("runs") / checked.recipe.name)
    rows, flops = model_table(run)
    if options.json:
        print_json(_as_json(run, checked, rows, flops))
        return 0
    print("\n".join(recipe_lines(run.recipe, checked)))
    print()
    _print_table(rows, flops)
    print()
    print("\n".join(derivation(builder, run)))
    return 0


def _as_json(run: Run, checked: Any, rows: list[dict[str, Any]], flops: int) -> dict[str, Any]:
    updates, progress = run.batches.updates, run.progress
    return {
        "recipe": run.recipe,
        "origins": {key: str(checked.origin(key)) for key, _ in leaves(run.recipe)},
        "model": {"parameters": rows[0]["parameters"], "flops_per_sample": flops, "layers": rows},
        "batch": {
            "global": updates.batch,
            "processes": run.mesh.world,
            "micro_batch": updates.micro_batch,
            "micro_batches": len(updates.cuts(0)),
            "steps_per_epoch": progress.steps_per_epoch,
            "total_steps": progress.total_steps,
            "lr": run.plan.schedules.lr.lr,
        },
    }


def model_table(run: Run) -> tuple[list[dict[str, Any]], int]:
    """Parameters and FLOPs of the model and of its parts down to the second level, for one sample."""
    import numpy as np
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, depth=2)
    batch = run.source.finish(run.source.fetch(0, np.arange(1)), 0, run.mesh.device)
    run.model.eval()
    with torch.inference_mode(), counter:
        run.task.predict(run.model, batch)
    counts = {name: sum(by_kind.values()) for name, by_kind in counter.get_flop_counts().items()}
    root = type(run.model).__name__
    rows = []
    for name, module in run.model.named_modules():
        if name.count(".") <= 1:
            parameters = sum(parameter.numel() for parameter in module.parameters())
            key = f"{root}.{name}" if name else "Global"
            rows.append(
                {
                    "name": name,
                    "type": type(module).__name__,
                    "parameters": parameters,
                    "flops": counts.get(key, 0),
                }
            )
    return rows, counter.get_total_flops()


def _print_table(rows: list[dict[str, Any]], flops: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("module", "type", box=None, header_style="bold", pad_edge=False)
    table.add_column("parameters", justify="right")
    table.add_column("MFLOPs/sample", justify="right")
    for row in rows:
        if row["parameters"] or row["flops"]:
            table.add_row(row["name"] or "(all)", row["type"], f"{row['parameters']:,}", f"{row['flops'] / 1e6:,.2f}")
    console = Console(width=max(100, Console().width), highlight=False)
    console.print(table)
