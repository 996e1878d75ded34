"""`paceline show`: print a resolved recipe and what follows from it."""

from __future__ import annotations

import argparse
import inspect
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import add_json, add_recipe, print_json, read_recipe
from paceline.core.errors import CheckpointError, DataError
from paceline.core.text import join_first, pluralize
from paceline.loggers.tables import table_lines

if TYPE_CHECKING:
    from torch import nn

    from paceline.engine.run import Run
    from paceline.plan.surrogate import SurrogateBuilder
    from paceline.recipe.schema import Recipe
    from paceline.recipe.validate import CheckedRecipe

_PLOTTED = 2000  # points of a curve; more cannot be seen
_ASSUMED_STEPS, _ASSUMED_CLASSES = 100, 10  # of an epoch, and of the data, where there is none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save the curve as a PNG file")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Print the resolved recipe, the model, the parameter groups, the batch and the learning rate."""
    builder, run, missing = build_assumed(read_recipe(options))
    for note in missing:
        print(f"warning: {note}", file=sys.stderr)
    if options.plot:
        _plot(run, options.plot)
    if options.json:
        print_json({**_as_json(run, builder), "missing": missing})
    else:
        _print(run, builder)
    return 0


def build_assumed(checked: CheckedRecipe) -> tuple[SurrogateBuilder, Run, list[str]]:
    """The run, and what it lacks: without its data it is built for data that is made up, without weights for random."""
    from paceline.recipe.build_data import make_split_loaders

    builder, missing = _builder(checked), list[str]()
    loaders = make_split_loaders(builder)
    if builder.missing:
        data, shape = loaders["train"].dataset, builder.shape
        found = f"{pluralize(len(data), 'sample')}, {pluralize(len(data.classes), 'class')}, {data.channels} channels"
        found += f", images of {shape.width}×{shape.height}"
        missing.append(f"{builder.missing}; this shows the recipe as if data.train had {found}")
    out = Path("runs") / checked.recipe.name
    try:
        return builder, builder.run(out, loaders), missing
    except (DataError, CheckpointError) as error:
        if checked.recipe.model.weights is None:
            raise
        missing.append(f"{error}; this shows the model with random weights")
    model = checked.recipe.model.model_copy(update={"weights": None})
    builder = _builder(replace(checked, recipe=checked.recipe.model_copy(update={"model": model})))
    run = builder.run(out, loaders)
    run.state.recipe["model"]["weights"] = checked.resolved()["model"]["weights"]
    return builder, run, missing


def _builder(checked: CheckedRecipe) -> SurrogateBuilder:
    from paceline.core.world import join
    from paceline.plan.surrogate import Shape, SurrogateBuilder

    world = join(checked.recipe.train.device, checked.locate("train.device"))
    shape = Shape(num_classes=_ASSUMED_CLASSES, num_samples=_ASSUMED_STEPS * checked.recipe.data.batch_size)
    return SurrogateBuilder(checked, world, shape, needs_known_task=False)


def _as_json(run: Run, builder: SurrogateBuilder) -> dict[str, Any]:
    from paceline.recipe.resolved import leaves

    rows, flops = model_table(run, builder.is_known_task)
    sampler, progress = run.batches.sampler, run.progress
    lr = run.scheduler.lr
    base = [lr(step) for step in range(progress.total_steps)]
    groups = _groups(run)
    return {
        "recipe": run.state.recipe,
        "origins": {key: str(builder.checked.origin(key)) for key, _ in leaves(run.state.recipe)},
        "model": {"parameters": rows[0]["parameters"], "flops_per_sample": flops, "layers": rows},
        "parts": code_of_parts(run, builder.recipe),
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


def code_of_parts(run: Run, recipe: Recipe) -> list[dict[str, Any]]:
    """Each part that the recipe names, with its module and where its code is: what a library's name makes is theirs."""
    from paceline.core.registry import register
    from paceline.core.user_code import is_ours
    from paceline.data.transforms.torchvision_v2 import v2_classes
    from paceline.recipe.parts import PARTS

    made = {"model": type(run.model), "optimizer": type(run.optimizer)}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for part in PARTS:
        for section in part.sections(recipe).values():
            name = getattr(section, part.name_key)
            entry = register.kind(part.kind).find(name)
            assert entry is not None, "validation let an unknown name through"
            code: Any = inspect.unwrap(getattr(entry.resolve(), "func", entry.resolve()))
            if part.kind == "transform" and entry.member:
                code = v2_classes()[entry.member]
            elif part.kind in made and is_ours(code) and not is_ours(made[part.kind]):
                code = made[part.kind]
            about = {"kind": part.kind, "name": name, "module": code.__module__, **_place(code)}
            found.setdefault((part.kind, name), about)
    return list(found.values())


def _place(code: Any) -> dict[str, Any]:
    """File and line: of installed packages below where they are installed; of the user's as the file lies."""
    import torch

    from paceline.core.contracts import relative_path

    try:
        file, line = Path(str(inspect.getsourcefile(code))), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):  # it has no source, as when it was typed into an interpreter
        return {"file": None, "line": None}
    roots = [Path(__file__).parents[2], Path(torch.__file__).parents[1], Path(sysconfig.get_path("purelib"))]
    below = [file.relative_to(root) for root in roots if file.is_relative_to(root)]
    return {"file": str(below[0]) if below else relative_path(str(file)), "line": line}


class _FirstCall(Exception):  # noqa: N818 - not an error
    """Ends a prediction where it calls the model, with what it calls it with."""


def _end_prediction(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    raise _FirstCall(*inputs)


def model_table(run: Run, is_known_task: bool = True) -> tuple[list[dict[str, Any]], int]:
    """Parameters, and FLOPs of a forward pass of one sample, of the model and its modules down to level two.

    And the FLOPs of them all; 0 where the samples of a task are not known.
    """
    import numpy as np
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from paceline.models.model_errors import call_model

    counter = FlopCounterMode(display=False, depth=2)
    run.model.eval()
    handle = run.model.register_forward_pre_hook(_end_prediction)
    try:
        batch = run.train_loader.transform_batch(run.train_loader.fetch(0, np.arange(1)), 0, run.world.device)
        with torch.no_grad():
            run.task.predict(run.model, batch)
    except _FirstCall as call:  # of several, where a task looks at an image flipped or at other scales
        handle.remove()
        with counter:  # with gradients: without, it fails for views of parameters that layers are called with
            call_model(run.model, batch["image"], *call.args[1:])
    except Exception:
        if is_known_task:
            raise
    finally:
        handle.remove()
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


def _print(run: Run, builder: SurrogateBuilder) -> None:
    from paceline.recipe.resolved import recipe_lines
    from paceline.run.summary import derivation
    from paceline.visualize.charts import terminal_curve

    rows, _ = model_table(run, builder.is_known_task)
    print("\n".join(recipe_lines(run.state.recipe, builder.checked)))
    print()
    parts = code_of_parts(run, builder.recipe)
    places = [f"{part['file']}:{part['line']}" if part["file"] else "" for part in parts]
    code = [(p["kind"], p["name"], p["module"], place) for p, place in zip(parts, places, strict=True)]
    print("\n".join(table_lines(("part", "name", "module", "code"), code, num_words=4)))
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
    print("", *derivation(run), "", sep="\n")
    print("learning rate before group factors, over the run")
    print("\n".join(terminal_curve([run.scheduler.lr(step) for step in _plotted_steps(run)])))


def _plotted_steps(run: Run) -> list[int]:
    total = run.progress.total_steps
    return sorted({total * k // _PLOTTED for k in range(_PLOTTED)} | {total - 1})


def _plot(run: Run, path: Path) -> None:
    """Plot the learning rate of each group to a PNG file; groups with the same rate share a curve."""
    from paceline.visualize.charts import draw_curves
    from paceline.visualize.image import save_png

    steps = _plotted_steps(run)
    base = [run.scheduler.lr(step) for step in steps]
    epochs = [step / run.progress.steps_per_epoch for step in steps]
    labels: dict[float, list[str]] = {}
    for group in _groups(run):
        labels.setdefault(group["lr_scale"], []).append(group["label"])
    curves = {join_first(names, 3): (epochs, [value * scale for value in base]) for scale, names in labels.items()}
    save_png(draw_curves(curves, f"{run.name}: learning rate", "epoch", "learning rate"), path)
