"""`paceline data`: inspect every sample of a recipe, or write a pack. Needs no task or model."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.common import print_json, progress_bar
from paceline.commands.data_recipe import open_split, read_data_recipe
from paceline.core.errors import DataError, UsageError
from paceline.core.text import evenly_spaced, pluralize
from paceline.recipe.validate import CheckedRecipe

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.commands.data_report import SplitReport
    from paceline.data.inspect import ContactSheet

_MEASURED_IN_MEMORY = 8192
_DRAWN = {True: 15, False: 5}  # samples on the sheet: of the first split, and of each further one
_INTERRUPTED = 130


def main(options: argparse.Namespace) -> int:
    """Inspect each split and print a report; the exit code is 3 if something is unreadable."""
    _check(options)
    if options.clear_cache:
        return _clear_cache(options.json)
    checked = read_data_recipe(options)
    known = list(checked.recipe.data.splits())
    splits = [options.split] if options.split else known
    if options.split and options.split not in known:
        raise UsageError(f"--split {options.split}: the recipe has no data.{options.split}")
    if options.pack:
        from paceline.commands.data_pack import pack

        return pack(checked, splits, options)
    return _inspect(checked, splits, options)


def _clear_cache(as_json: bool) -> int:
    from paceline.data.index.index import clear_cache

    count, size = clear_cache()
    if as_json:
        print_json({"removed": count, "bytes": size})
    else:
        print(f"removed {pluralize(count, 'index file')}, {size / 1e6:,.1f} MB; they are built again when needed")
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.recipe is None and not options.clear_cache:
        raise UsageError("data needs a recipe, or --clear-cache")
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
                _inspect_split(checked, report, sheet, options.limit, bar)
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
    checked: CheckedRecipe, report: SplitReport, sheet: ContactSheet, limit: int | None, bar: Progress
) -> None:
    """The report of one split; if it cannot be opened, the report says why."""
    from paceline.data.datasets.video import whole_videos
    from paceline.data.inspect import examine
    from paceline.data.loader import usable_cores
    from paceline.data.loader_profile import NUM_MEASURED, input_stats, profile_loader
    from paceline.data.skip_list import UNREADABLE

    try:
        source = open_split(checked, report.split)
    except DataError as error:
        report.error = str(error)
        return
    report.opened(source)
    files = whole_videos(source.dataset)  # a video is inspected once, even if each of its clips is a sample
    report.samples = size = len(files)
    indices = evenly_spaced(size, min(size, limit or size))
    threads = usable_cores()
    advance = partial(bar.advance, bar.add_task(report.split, total=len(indices)))
    examine(files, indices, report.findings, threads, advance, source.sample_transforms)
    for note in report.findings.notes:
        report.add_note(note)
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
        report.stages = profile_loader(
            source, [readable[place] for place in evenly_spaced(len(readable), most)], threads
        )
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
