"""`paceline data`: inspect every sample of a recipe, or write a pack. Needs no task or model."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import add_json, add_recipe, print_json, progress_bar, recipe_file, use_modules
from paceline.core.errors import DataError, UsageError
from paceline.core.text import evenly_spaced, pluralize

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.commands.data_report import SplitReport
    from paceline.data.inspect import ContactSheet
    from paceline.data.pack import WrittenPack
    from paceline.data.split_loader import SplitLoader
    from paceline.recipe.document import Document
    from paceline.recipe.validate import CheckedRecipe

_SPLITS = ("train", "val", "test")
# What a recipe has to have beside its data, as plain as can be: nothing of it is built.
_PLACEHOLDER: dict[str, Any] = {
    "task": {"name": "classification"},
    "model": {"name": "convnet"},
    "data": {"batch_size": 1},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"epochs": 1},
}
_MEASURED_IN_MEMORY = 8192
_DRAWN = {True: 15, False: 5}  # samples on the sheet: of the first split, and of each further one
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)
    parser.add_argument("--split", metavar="SPLIT", help="train, val, test or test.NAME (default: all in the recipe)")
    parser.add_argument("--limit", type=int, metavar="N", help="inspect N evenly spaced samples of each split")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="file of the contact sheet (default: data-NAME.png)")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the samples into a pack instead")
    parser.add_argument(
        "--size", metavar="N or HxW", help="size of images in the pack: shorter side, or height and width"
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Inspect each split and print a report; the exit code is 3 if something is unreadable."""
    _check(options)
    checked = read_data_recipe(options)
    known = list(checked.recipe.data.splits())
    splits = [options.split] if options.split else known
    if options.split and options.split not in known:
        raise UsageError(f"--split {options.split}: the recipe has no data.{options.split}")
    if options.pack:
        return _pack(checked, splits, options)
    return _inspect(checked, splits, options)


def read_data_recipe(options: argparse.Namespace) -> CheckedRecipe:
    """A command line's recipe with its own data section and name; the rest stands for anything."""
    from paceline.recipe.load import load
    from paceline.recipe.validate import validate

    use_modules(options.use, options.recipe)
    return validate(_data_alone(load(recipe_file(options.recipe), options.overrides)))


def _data_alone(document: Document) -> Document:
    """Name, data and seed of a recipe, with placeholders for everything else."""
    from paceline.recipe.document import Document, places
    from paceline.recipe.load import merge

    kept = {key: value for key, value in document.tree.items() if key in ("name", "data")}
    train = document.tree.get("train")
    if isinstance(train, dict) and "seed" in train:
        kept["train"] = {"seed": train["seed"]}
    own = Document(kept)
    for table, origins in ((own.keys, document.keys), (own.values, document.values)):
        table.update({path: origin for path, origin in origins.items() if path == () or path[0] in kept})
    placeholder = Document(_PLACEHOLDER, {}, dict.fromkeys(places(_PLACEHOLDER, ()), own.values[()]))
    return merge(placeholder, own)


def open_split(checked: CheckedRecipe, split: str) -> SplitLoader:
    """Open one split with its transforms, or raise DataError."""
    import torch

    from paceline.core.world import World
    from paceline.recipe.build_context import BuildContext
    from paceline.recipe.build_data import make_split_loaders
    from paceline.recipe.validate import CheckedRecipe

    kept, _, name = split.partition(".")
    changes: dict[str, Any] = {each: None for each in _SPLITS if each != kept}
    if name:
        changes["test"] = {name: checked.recipe.data.splits()[split]}
    recipe = checked.recipe.model_copy(update={"data": checked.recipe.data.model_copy(update=changes)})
    context = BuildContext(CheckedRecipe(recipe, checked.document), World(0, 1, 0, torch.device("cpu")))
    return make_split_loaders(context)[split]


def _pads_images(options: argparse.Namespace) -> bool:
    """Whether the recipe's task, if that is one, takes images of different sizes."""
    from paceline.core.registry import register
    from paceline.recipe.load import load

    task = load(recipe_file(options.recipe), options.overrides).tree.get("task")
    entry = register.kind("task").find(str(task.get("name") if isinstance(task, dict) else task))
    return entry is not None and getattr(entry.resolve(), "pads_images", False)


def _check(options: argparse.Namespace) -> None:
    if options.size is not None and not options.pack:
        raise UsageError("--size is the size of images in a pack; give the file to write as --pack FILE")
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit {options.limit}: expected a number of samples, 1 or more")


def _inspect(checked: CheckedRecipe, splits: list[str], options: argparse.Namespace) -> int:
    from paceline.commands.data_report import SplitReport, as_json, lines
    from paceline.data.inspect import ContactSheet

    reports: list[SplitReport] = []
    sheet, path, interrupted = ContactSheet(), options.sheet or Path(f"data-{checked.recipe.name}.png"), False
    try:
        with progress_bar() as bar:
            for split in splits:
                report = SplitReport(split, checked.recipe.data.splits()[split].dataset)
                reports.append(report)
                _inspect_split(checked, report, sheet, options.limit, bar, _pads_images(options))
    except KeyboardInterrupt:
        interrupted = True
    written = _write_sheet(sheet, checked, path, reports)
    if options.json:
        print_json(as_json(checked.recipe.name, reports, written, interrupted))
    else:
        print("\n".join(lines(checked.recipe.name, reports, written, interrupted)))
    if interrupted:
        return _INTERRUPTED
    return DataError.exit_code if any(report.has_bad for report in reports) else 0


def _inspect_split(
    checked: CheckedRecipe,
    report: SplitReport,
    sheet: ContactSheet,
    limit: int | None,
    bar: Progress,
    pads_images: bool,
) -> None:
    """The report of one split; if it cannot be opened, the report says why."""
    from paceline.data.inspect import examine
    from paceline.data.loader import usable_cores
    from paceline.data.loader_profile import NUM_MEASURED, input_stats, loading_speed
    from paceline.data.padding import Padding
    from paceline.data.skip_list import UNREADABLE

    try:
        source = open_split(checked, report.split)
    except DataError as error:
        report.error = str(error)
        return
    source.padding = Padding() if pads_images else None
    report.opened(source)
    size = report.samples
    indices = evenly_spaced(size, min(size, limit or size))
    threads = usable_cores()
    advance = partial(bar.advance, bar.add_task(report.split, total=len(indices)))
    examine(source.dataset, indices, report.findings, threads, advance)
    unreadable = {each.sample for each in report.findings.bad}
    readable = [index for index in indices if index not in unreadable] if unreadable else indices
    if not readable:
        return
    readable = [index * len(source.dataset) // size for index in readable]
    few = [readable[place] for place in evenly_spaced(len(readable), _DRAWN[not sheet.panels])]
    report.add_note(sheet.add(source, report.split, few))
    report.inputs = input_stats(source, readable)
    most = _MEASURED_IN_MEMORY if source.in_memory else NUM_MEASURED
    try:
        measured = [readable[place] for place in evenly_spaced(len(readable), most)]
        report.speed = loading_speed(source, measured, threads)
    except UNREADABLE as error:
        report.add_note(str(error))


def _write_sheet(sheet: ContactSheet, checked: CheckedRecipe, path: Path, reports: list[SplitReport]) -> Path | None:
    from paceline.visualize.image import save_png

    if not sheet.panels:
        return None
    try:
        save_png(sheet.draw(f"{checked.recipe.name}: transformed samples of the first epoch"), path)
    except OSError as error:
        reports[0].add_note(f"cannot write the contact sheet {path}: {error.strerror}; choose another with --sheet")
        return None
    return path


def _pack(checked: CheckedRecipe, splits: list[str], options: argparse.Namespace) -> int:
    """Write a pack for each split: `FILE`, or `FILE-SPLIT` if there are several."""
    from paceline.data.pack import write_pack

    size = _size(options.size)
    written: dict[str, WrittenPack] = {}
    with progress_bar() as bar:
        for split in splits:
            path: Path = options.pack
            if len(splits) > 1:
                path = path.with_stem(f"{path.stem}-{split}")
            source = open_split(checked, split)
            if getattr(source.dataset, "reads_videos", False):
                raise UsageError(f"--pack: data.{split} has videos; a pack holds images")
            row = bar.add_task(split, total=len(source.dataset))
            allowed = 0 if source.skips is None else source.skips.limit
            written[split] = write_pack(source.dataset, path, size, partial(_show, bar, row), allowed)
    if options.json:
        packs = {
            split: {"file": str(each.path), "samples": each.samples, "bytes": each.bytes}
            | {"left_out": [left_out._asdict() for left_out in each.skipped]}
            for split, each in written.items()
        }
        print_json({"name": checked.recipe.name, "packs": packs})
        return 0
    for split, each in written.items():
        print(f"{split}: {pluralize(each.samples, 'sample')}, {each.bytes / 1e6:,.1f} MB in {each.path}")
        for left_out in each.skipped:
            print(f"  skipped: {left_out}")
    print("\nto use it, write this into the recipe and keep the transforms:\n\ndata:")
    for split, each in written.items():
        print(f"  {split}: {{dataset: packed, file: {each.path.absolute()}}}")
    return 0


def _show(bar: Progress, row: Any, done: int, total: int) -> None:
    bar.update(row, completed=done)


def _size(text: str | None) -> int | list[int] | None:
    """Parse `--size`: a shorter side, or height and width."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
    if not match:
        raise UsageError(f"--size {text}: expected a shorter side such as 256, or height x width such as 224x320")
    height, width = match.groups()
    return int(height) if width is None else [int(height), int(width)]
