"""`paceline show`: print a resolved recipe and what follows from it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import print_json, read_recipe, table_lines
from paceline.commands.run_directory import leaves, recipe_lines
from paceline.core.errors import CheckpointError, DataError
from paceline.core.text import join_first, pluralize
from paceline.recipe.validate import CheckedRecipe

if TYPE_CHECKING:
    from paceline.data.batch import Sample
    from paceline.data.split_loader import SplitLoader
    from paceline.engine.run import Run
    from paceline.recipe.build import Builder

_PLOTTED = 2000  # points of a curve; more cannot be seen
_ASSUMED_STEPS, _ASSUMED_CLASSES = 100, 10  # of an epoch, and of the data, where there is none


def main(options: argparse.Namespace) -> int:
    """Print the resolved recipe, the model, the parameter groups, the batch and the learning rate."""
    builder, run, missing = _build(read_recipe(options))
    for note in missing:
        print(f"warning: {note}", file=sys.stderr)
    if options.plot:
        _plot(run, options.plot)
    if options.json:
        print_json({**_as_json(run, builder), "missing": missing})
    else:
        _print(run, builder)
    return 0


def _build(checked: CheckedRecipe) -> tuple[Builder, Run, list[str]]:
    """The run, and what it lacks: without its data it is built for data that is made up, without weights for random."""
    from paceline.recipe.build import Builder
    from paceline.recipe.build_data import make_split_loaders

    builder, missing = Builder(checked, trains=False), list[str]()
    try:
        loaders = make_split_loaders(builder)
    except DataError as error:
        loaders = {"train": _placeholder_loader(builder)}
        data = loaders["train"].dataset
        assumed = f"{pluralize(len(data), 'sample')}, {pluralize(len(data.classes), 'class')}, {data.channels} channels"
        missing.append(f"{error}; this shows the recipe as if data.train had {assumed}")
    out = Path("runs") / checked.recipe.name
    try:
        return builder, builder.run(out, loaders), missing
    except (DataError, CheckpointError) as error:
        if checked.recipe.model.weights is None:
            raise
        missing.append(f"{error}; this shows the model with random weights")
    model = checked.recipe.model.model_copy(update={"weights": None})
    builder = Builder(replace(checked, recipe=checked.recipe.model_copy(update={"model": model})), trains=False)
    run = builder.run(out, loaders)
    run.state.recipe["model"]["weights"] = checked.resolved()["model"]["weights"]
    return builder, run, missing


def _placeholder_loader(builder: Builder) -> SplitLoader:
    from paceline.recipe.build_data import add_transforms

    part = builder.recipe.data.train
    arguments = part.model_extra or {}
    known = 1 if arguments.get("binary") else len(arguments.get("classes") or ()) or _ASSUMED_CLASSES
    number = builder.recipe.model.num_classes or known
    dataset = PlaceholderDataset([str(each) for each in range(number)], _ASSUMED_STEPS * builder.recipe.data.batch_size)
    return add_transforms(builder, "train", part, dataset, None)


class PlaceholderDataset:
    """Stands for a data set that is not there: black images of the usual kind."""

    channels = 3

    def __init__(self, classes: list[str], size: int) -> None:
        self.classes, self._size = classes, size

    def __len__(self) -> int:
        return self._size

    def read(self, index: int) -> Sample:
        """A black image, which a transform may crop or resize."""
        import numpy as np

        return {"image": np.zeros((256, 256, self.channels), np.uint8), "label": 0}


def _as_json(run: Run, builder: Builder) -> dict[str, Any]:
    rows, flops = model_table(run)
    sampler, progress = run.batches.sampler, run.progress
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
            "global": sampler.batch,
            "processes": run.world.size,
            "micro_batch_size": sampler.micro_batch_size,
            "micro_batches": len(sampler.slices(0)),
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
    run.model.eval()
    try:
        batch = run.train_loader.transform_batch(run.train_loader.fetch(0, np.arange(1)), 0, run.world.device)
        with torch.inference_mode(), counter:
            run.task.predict(run.model, batch)
    except Exception:
        if not isinstance(
            run.train_loader.dataset, PlaceholderDataset
        ):  # which has no masks, boxes or videos: no FLOPs then
            raise
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
    modules = [row for row in rows if row["parameters"] or row["flops"]]
    cells = [(r["name"] or "(all)", r["type"], f"{r['parameters']:,}", f"{r['flops'] / 1e6:,.2f}") for r in modules]
    print("\n".join(table_lines(("module", "type", "parameters", "MFLOPs/sample"), cells, num_words=2)))
    for lines in (builder.fitted.summary() if builder.fitted else [], run.freezing.describe()):
        if lines:
            print("", *lines, sep="\n")
    print()
    groups = [
        (g["label"], f"{g['lr_scale']:g}", f"{g['weight_decay']:g}", str(g["tensors"]), f"{g['parameters']:,}")
        for g in _groups(run)
    ]
    print("\n".join(table_lines(("group", "lr ×", "weight decay", "tensors", "parameters"), groups)))
    print("", *derivation(builder, run), "", sep="\n")
    print("learning rate before group factors, over the run")
    print("\n".join(terminal_curve([run.scheduler.lr(step) for step in _plotted_steps(run)])))


def _plotted_steps(run: Run) -> list[int]:
    total = run.progress.total_steps
    return sorted({total * k // _PLOTTED for k in range(_PLOTTED)} | {total - 1})


def _plot(run: Run, path: Path) -> None:
    """Plot the learning rate of each group to a PNG file; groups with the same rate share a curve."""
    from paceline.visualize.curves import draw_curves
    from paceline.visualize.image import save_png

    steps = _plotted_steps(run)
    base = [run.scheduler.lr(step) for step in steps]
    epochs = [step / run.progress.steps_per_epoch for step in steps]
    labels: dict[float, list[str]] = {}
    for group in _groups(run):
        labels.setdefault(group["lr_scale"], []).append(group["label"])
    curves = {join_first(names, 3): (epochs, [value * scale for value in base]) for scale, names in labels.items()}
    save_png(draw_curves(curves, f"{run.name}: learning rate", "epoch", "learning rate"), path)
