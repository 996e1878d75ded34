"""`paceline plan`: the memory that a run will need, before it starts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.commands.common import print_json, print_table, progress_bar, recipe_file, use_modules
from paceline.core.errors import RecipeError, UsageError
from paceline.recipe.load import load
from paceline.recipe.validate import CheckedRecipe, validate

if TYPE_CHECKING:
    from paceline.plan.grid import Refused, Row
    from paceline.plan.surrogate import Shape

_UNIT = 2**20
_SHORT = {"train.precision": "precision", "train.activation_checkpointing": "checkpointing"}


def main(options: argparse.Namespace) -> int:
    """Rehearse each combination of settings on fake tensors and print what it needs."""
    from paceline.plan.devices import memory_at_hand, parse_memory
    from paceline.plan.grid import combinations, plan_row, split_choices

    use_modules(options.use)
    reference = recipe_file(options.recipe)
    fixed, choices = split_choices(options.overrides)
    checked = validate(load(reference, fixed))
    name, limit = (options.memory, parse_memory(options.memory)) if options.memory else memory_at_hand()
    asked = combinations({"procs": _processes(options.procs), **(choices or _defaults(checked, fixed))})
    settings, shape = list(asked), _shape(options)
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("plan", total=len(settings))
        for each in settings:
            rows.append(plan_row(reference, fixed, each, limit, shape))
            bar.advance(task)
    if options.json:
        print_json({"memory": limit, "rows": [_as_json(row, limit) for row in rows]})
        return 0
    _print(rows, name, limit)
    if any(getattr(row, "missing", "") for row in rows):
        print(
            f"the data is not here: images are taken to be {options.image} (--image), and classes, unless the recipe"
            f" has model.num_classes, to be {options.classes} (--classes)"
        )
    return 0


def _shape(options: argparse.Namespace) -> Shape:
    from paceline.plan.surrogate import Shape

    width, separator, height = options.image.partition("x")
    if not (separator and width.isdecimal() and height.isdecimal() and int(width) * int(height)):
        raise UsageError(f"--image {options.image}: expected width and height, such as 640x480")
    if options.classes < 1:
        raise UsageError(f"--classes {options.classes}: expected 1 or more")
    return Shape(int(height), int(width), options.classes)


def _processes(written: str) -> list[str]:
    if not all(each.isdecimal() and int(each) > 0 for each in written.split(",")):
        raise UsageError(f"--procs {written}: expected numbers of processes, such as 8 or 1,2,8")
    return written.split(",")


def _defaults(checked: CheckedRecipe, fixed: Sequence[str]) -> dict[str, list[str]]:
    """The default settings to compare: precisions, and activation checkpointing off and on."""
    given = {override.partition("=")[0] for override in fixed}
    train = checked.recipe.train
    choices = {
        "train.precision": [train.precision, *({"fp32", "bf16"} - {train.precision})],
        "train.activation_checkpointing": list(dict.fromkeys([train.activation_checkpointing.name, "none", "blocks"])),
    }
    return {key: values for key, values in choices.items() if key not in given}


def _print(rows: Sequence[Row | Refused], name: str, limit: int) -> None:
    from paceline.plan.grid import Refused
    from paceline.plan.memory import CATEGORIES

    planned = [row for row in rows if not isinstance(row, Refused)]
    if not planned:
        raise RecipeError(next(row.reason for row in rows if isinstance(row, Refused)))
    keys = list(planned[0].settings)
    header = [*(_SHORT.get(key, key.rpartition(".")[2]) for key in keys), "micro-batch", "memory", "fits", "largest"]
    cells = []
    for row in planned:
        values = [row.settings[key] for key in keys]
        largest = str(row.largest_micro_batch)
        cells.append([*values, str(row.micro_batch_size), _size(row.memory.total), _mark(row.fits(limit)), largest])
    print(f"memory of each device, MiB of tensors; {name}: {_size(limit)} MiB")
    print_table(
        [*header, *CATEGORIES],
        [
            [*left, *(_size(row.memory.parts[part]) for part in CATEGORIES)]
            for left, row in zip(cells, planned, strict=True)
        ],
    )
    for refused in rows:
        if isinstance(refused, Refused):
            settings = ", ".join(f"{key} {value}" for key, value in refused.settings.items())
            print(f"not possible: {settings}: {refused.reason}", file=sys.stderr)
    if not any(row.fits(limit) for row in planned):
        print(_advice(planned))


def _advice(rows: Sequence[Row]) -> str:
    """What to change first when nothing fits."""
    best = max(rows, key=lambda row: (row.largest_micro_batch or 0, -row.memory.total))
    settings = " ".join(f"{key}={value}" for key, value in best.settings.items() if key != "procs")
    if best.largest_micro_batch:
        return f"nothing fits as it is; this does: {settings} train.micro_batch_size={best.largest_micro_batch}"
    least = min(rows, key=lambda row: row.memory.total)
    part = max(least.memory.parts, key=lambda each: least.memory.parts[each])
    hint = {
        "activations": "use smaller images", "temporaries": "use smaller images",
    }.get(part, "use train.strategy=fsdp with more processes, or a smaller model")  # fmt: skip
    return f"nothing fits, not even a micro-batch of one sample; {part} are the most: {hint}"


def _size(number: int) -> str:
    return f"{number / _UNIT:,.0f}" if number >= 10 * _UNIT else f"{number / _UNIT:,.1f}"


def _mark(fits: bool) -> str:
    return "yes" if fits else "no"


def _as_json(row: Row | Refused, limit: int) -> dict[str, Any]:
    from paceline.plan.grid import Refused

    if isinstance(row, Refused):
        return {"settings": dict(row.settings), "reason": row.reason}
    return {
        "settings": dict(row.settings),
        "micro_batch_size": row.micro_batch_size,
        "bytes": dict(row.memory.parts),
        "total_bytes": row.memory.total,
        "fits": row.fits(limit),
        "largest_micro_batch": row.largest_micro_batch,
    }
