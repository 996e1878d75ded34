"""A progress bar for commands that go through many samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar for each split on the terminal; nothing where there is none."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    is_seen = console.is_terminal and os.environ.get("TERM") != "dumb"
    with Progress(*columns, console=console, transient=True, disable=not is_seen) as bar:
        yield bar
