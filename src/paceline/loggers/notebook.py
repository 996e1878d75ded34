"""Progress in a notebook: lines as the output of the cell, and a bar that is redrawn in its place."""

from __future__ import annotations

import secrets
import sys
from html import escape
from typing import Any

from paceline.loggers.events import Logged, Snapshot
from paceline.loggers.messages import Words, plain, status

_STATUS_WIDTH = 80


def is_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookPage:
    """Prints lines on standard output, which notebooks show without a warning color, and draws a bar among them."""

    def __init__(self) -> None:
        self._bar = ""

    def print(self, words: Words) -> None:
        """Print a line."""
        print(plain(words), flush=True)

    def draw(self, snapshot: Snapshot, logged: Logged | None) -> None:
        """Draw the bar, or draw it again."""
        now, total = snapshot.evaluation[1:] if snapshot.evaluation else (snapshot.step, snapshot.total_steps)
        text = plain(status(snapshot, logged, _STATUS_WIDTH))
        bar = f'<progress value="{now}" max="{max(total, 1)}" style="width: 20em"></progress>'
        self._display({"text/plain": text, "text/html": f"{bar} <code>{escape(text)}</code>"})

    def keep(self) -> None:
        """Leave the bar as it is."""
        self._bar = ""

    def clear(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._display({"text/plain": "", "text/html": ""})
            self._bar = ""

    def _display(self, content: dict[str, str]) -> None:
        from IPython.display import display, update_display

        if self._bar:
            update_display(content, raw=True, display_id=self._bar)
        else:
            self._bar = secrets.token_hex(8)
            display(content, raw=True, display_id=self._bar)
