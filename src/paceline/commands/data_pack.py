"""`paceline data --pack`: write packs, and print the recipe lines that use them."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.commands.common import print_json, progress_bar
from paceline.commands.data_recipe import open_split
from paceline.core.errors import UsageError
from paceline.core.text import pluralize
from paceline.recipe.validate import CheckedRecipe

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def pack(checked: CheckedRecipe, splits: list[str], options: argparse.Namespace) -> int:
    """Write a pack for each split: `FILE`, or `FILE-SPLIT` if there are several."""
    from paceline.data.pack import WrittenPack, write_pack

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
            advance = partial(_advance, bar, bar.add_task(split, total=len(source.dataset)))
            allowed = 0 if source.skips is None else source.skips.limit
            written[split] = write_pack(source.dataset, path, size, advance, allowed)
    if options.json:
        print_json({"name": checked.recipe.name, "packs": {split: _as_json(each) for split, each in written.items()}})
        return 0
    for split, each in written.items():
        print(f"{split}: {pluralize(each.samples, 'sample')}, {each.bytes / 1e6:,.1f} MB in {each.path}")
        for left_out in each.skipped:
            print(f"  skipped: {left_out}")
    print("\nto use it, write this into the recipe and keep the transforms:\n\ndata:")
    for split, each in written.items():
        print(f"  {split}: {{dataset: packed, file: {each.path.absolute()}}}")
    return 0


def _advance(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done)


def _as_json(written: Any) -> dict[str, Any]:
    left_out = [each._asdict() for each in written.skipped]
    return {"file": str(written.path), "samples": written.samples, "bytes": written.bytes, "left_out": left_out}


def _size(text: str | None) -> int | list[int] | None:
    """Parse `--size`: a shorter side, or height and width."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
    if not match:
        raise UsageError(f"--size {text}: expected a shorter side such as 256, or height x width such as 224x320")
    height, width = match.groups()
    return int(height) if width is None else [int(height), int(width)]
