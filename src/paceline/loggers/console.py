"""Console output: lines with a progress bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections import Counter
from dataclasses import replace
from functools import cached_property
from html import escape
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from paceline.loggers.events import Ended, Event, Logged, Logger, Note, Snapshot, Started
from paceline.loggers.messages import first_step, lines_of, status

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.live import Live

SECONDS_BETWEEN_DRAWS = 0.5  # as often as there are new metrics; a draw takes up to 2 ms
SECONDS_BETWEEN_LINES = 1.0
LINE_WIDTH = 80
_NOTEBOOK_WIDTH = 80
_BAR_WIDTH = 30


class Console(Logger):
    """Print a line for each event; on a terminal, a progress bar below the lines, in a notebook among them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        in_notebook = stream is None and _is_notebook()
        stream = sys.stderr if stream is None else stream
        on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._page: _PlainPage | _NotebookPage = _TerminalPage(stream) if on_terminal else _PlainPage(stream)
        if in_notebook:
            self._page = _NotebookPage()
        self._next_draw = 0.0 if on_terminal or in_notebook else inf
        self._next_line = 0.0
        self._total_steps = 0
        self._main_metric: str | None = None
        self._started: float | None = None  # until something is known of training
        self._logged: Logged | None = None
        self._trained: Snapshot | None = None
        self._warnings = Counter[str]()

    def handle(self, event: Event) -> None:
        """Print the lines of an event; the end of the run removes the bar first."""
        if isinstance(event, Started):
            self._total_steps, self._main_metric = event.total_steps, event.main_metric
            self._started = monotonic()
        elif isinstance(event, Logged):
            self._logged, self._started = event, None
            if monotonic() < self._next_line:
                return  # on a terminal the bar shows them; a line for each would only run past
            self._next_line = monotonic() + SECONDS_BETWEEN_LINES if self._next_draw != inf else 0.0
        elif isinstance(event, Ended):
            if event.state == "finished":
                self._complete()
            self.close()
            if event.is_reported:
                return
            event = replace(event, reason=None)
        elif isinstance(event, Note):
            if event.level == "detail" or (text := self._due(event)) is None:
                return
            event = replace(event, text=text)
        for line in lines_of(event, self._total_steps, LINE_WIDTH, self._main_metric):
            self._page.print(line)

    def _due(self, note: Note) -> str | None:
        """The text of a note; of a warning that differs from others in numbers alone, the 1st, 10th, 100th, …"""
        if note.level != "warning":
            return note.text
        kind = re.sub(r"\d+", "#", note.text)
        self._warnings[kind] += 1
        times = self._warnings[kind]
        if str(times).strip("0") != "1":
            return None
        return note.text + (f" ({times:,} times so far; all are in logs/)" if times > 1 else "")

    def tick(self, snapshot: Snapshot) -> None:
        """Redraw the bar if the last drawing is old enough, or if this is the end of training or an evaluation."""
        done, total = snapshot.evaluation[1:] if snapshot.evaluation else (snapshot.step, snapshot.total_steps)
        if snapshot.evaluation is None:
            self._trained = snapshot
            if self._started is not None and self._next_draw == inf:  # the first line of the log may be minutes away
                self._page.print(first_step(snapshot, monotonic() - self._started))
            self._started = None
        if self._next_draw != inf and (done == total or monotonic() >= self._next_draw):
            self._draw(snapshot)

    def close(self) -> None:
        """Remove the bar; lines can still be printed."""
        self._next_draw = inf
        self._page.clear()

    def _complete(self) -> None:
        """Leave the bar on the screen, as far as the run has come."""
        if self._trained is not None and self._next_draw != inf:
            self._draw(self._trained)
            self._page.keep()

    def _draw(self, snapshot: Snapshot) -> None:
        self._next_draw = inf  # and so it stays if the terminal is gone: a failing draw is not repeated
        self._page.draw(snapshot, self._logged)
        self._next_draw = monotonic() + SECONDS_BETWEEN_DRAWS


class _PlainPage:
    """Prints lines; there is no bar."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def print(self, line: str) -> None:
        self._stream.write(_printable(line, self._stream) + "\n")
        self._stream.flush()

    def draw(self, snapshot: Snapshot, logged: Logged | None) -> None: ...

    def keep(self) -> None: ...

    def clear(self) -> None: ...


class _TerminalPage(_PlainPage):
    """Prints lines and a bar with rich, imported on first use."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._live: Live | None = None

    def print(self, line: str) -> None:
        style = "yellow" if line.startswith("warning: ") else "bold" if line.startswith("== ") else None
        self._terminal.print(_printable(line, self._stream), style=style)

    def draw(self, snapshot: Snapshot, logged: Logged | None) -> None:
        from rich.text import Text

        now, total = snapshot.evaluation[1:] if snapshot.evaluation else (snapshot.step, snapshot.total_steps)
        width = min(_BAR_WIDTH, self._terminal.width // 4)
        num_done = min(width, width * now // max(total, 1))
        done, left = "━─" if self._terminal.encoding.startswith("utf") else "#-"
        words = _printable(status(snapshot, logged, self._terminal.width - width - 1), self._stream)
        text = Text.assemble((done * num_done, "cyan"), (left * (width - num_done), "dim"), f" {words}", no_wrap=True)
        self._running().update(text, refresh=True)

    def keep(self) -> None:
        if self._live is not None:
            self._live.transient = False

    def clear(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _running(self) -> Live:
        from rich.live import Live

        if self._live is None:
            self._live = Live(
                console=self._terminal,
                auto_refresh=False,
                transient=True,
                # What a model prints would break the bar, unless it goes elsewhere than to this terminal.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
            self._terminal.show_cursor(True)  # a process that is killed cannot bring it back
        return self._live

    @cached_property
    def _terminal(self) -> Terminal:
        from rich.console import Console as Terminal

        return Terminal(file=self._stream, force_terminal=True, markup=False, emoji=False)


def _printable(text: str, stream: TextIO) -> str:
    """`text` with characters escaped that the stream cannot encode."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


class _NotebookPage:
    """Prints lines on standard output, which notebooks show without a warning color, and draws a bar among them."""

    def __init__(self) -> None:
        self._bar = ""

    def print(self, line: str) -> None:
        print(line, flush=True)

    def draw(self, snapshot: Snapshot, logged: Logged | None) -> None:
        now, total = snapshot.evaluation[1:] if snapshot.evaluation else (snapshot.step, snapshot.total_steps)
        text = status(snapshot, logged, _NOTEBOOK_WIDTH)
        bar = f'<progress value="{now}" max="{max(total, 1)}" style="width: 20em"></progress>'
        self._display({"text/plain": text, "text/html": f"{bar} <code>{escape(text)}</code>"})

    def keep(self) -> None:
        self._bar = ""

    def clear(self) -> None:
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


def _is_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
