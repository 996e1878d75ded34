from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path

import pytest

from paceline.loggers import console as console_module
from paceline.loggers.console import Console
from paceline.loggers.events import (
    Ended,
    Evaluated,
    EvaluationProgress,
    Event,
    Logged,
    LoggerGroup,
    Note,
    Saved,
    Snapshot,
    Started,
)
from paceline.loggers.messages import duration, lines_of, number, status

CLOCK = {
    "time": 1.0,
    "step_time": {"median": 0.0427},
    "samples_per_second": 5304.2,
    "data_wait": 0.021,
    "memory_mb": 410.3,
    "eta_seconds": 70.0,
}
LOGGED = Logged(240, 1.25, {"loss": 0.9, "lr": 0.1}, {"loss": {"median": 0.412}, "lr": {"median": 0.2}}, CLOCK)
METRICS = {"mae": 0.31, "loss": 0.31, "top1": 0.912, **{f"metric_{number}": 0.125 for number in range(6)}}
EVENTS: list[Event] = [
    Started("fashion", Path("runs/fashion"), "cpu", 2, 1880, 192, 0, ["micro-batches of 64"], "top1"),
    LOGGED,
    Evaluated(240, 1.25, "val", METRICS, 2000, 3, {"seconds": 1.25}),
    Saved(240, Path("runs/fashion/checkpoints/step-00000240"), is_best=True),
    Note("3 files were skipped [see above] :smile:", "warning"),
    Ended("finished", 1880, 9.79, ["best     runs/fashion/best", "metrics  runs/fashion/metrics.jsonl"]),
]
LINES = [
    "fashion: 1,880 steps, 192 per epoch, on cpu in 2 processes, into runs/fashion",
    "  micro-batches of 64",
    "epoch 1.25 step 240/1880 loss 0.412 lr 0.1 samples/s 5300 eta 0:01:10",
    "== val at step 240: 2,000 samples, 3 skipped in 1.2 s",
    "   top1 0.912  loss 0.31  metric_0 0.125  metric_1 0.125  metric_2 0.125",
    "   metric_3 0.125  metric_4 0.125  metric_5 0.125",
    "saved runs/fashion/checkpoints/step-00000240, the best so far",
    "warning: 3 files were skipped [see above] :smile:",
    "finished at step 1880, epoch 9.79",
    "  best     runs/fashion/best",
    "  metrics  runs/fashion/metrics.jsonl",
]


class PseudoTerminal:
    """A terminal that remembers what was written to it."""

    def __init__(self, columns: int) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self._received = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._received += os.read(self.master, 4096)
            except OSError:  # the other side was closed
                return

    def text(self) -> str:
        """All that was written; the terminal is gone afterwards."""
        self.stream.close()
        self._reader.join()
        os.close(self.master)
        return self._received.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> PseudoTerminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(console_module, "SECONDS_BETWEEN_DRAWS", 0.0)
    return PseudoTerminal(120)


def show_run(console: Console) -> None:
    for event in EVENTS[:-1]:
        console.handle(event)
    for step in range(241, 244):
        console.tick(Snapshot(step, 1880, step / 192, 0.05))
    console.handle(EVENTS[-1])
    console.close()


def screen_lines(text: str) -> list[str]:
    """What stays on the screen, for the few controls that are used: up a line, erase the line, styles."""
    screen, row, column = [""], 0, 0
    for control, count, kind, letter in re.findall(r"(\x1b\[([0-9;?]*)([A-Za-z]))|(.)", text, flags=re.DOTALL):
        if kind == "A":
            row -= int(count)
        elif kind == "K":
            screen[row] = ""
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
            screen += [""] * (row == len(screen))
        elif not control:
            screen[row] = screen[row][:column].ljust(column) + letter + screen[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in screen]


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    show_run(Console(stream))
    assert stream.getvalue().splitlines() == LINES


def test_plain_lines_begin_with_the_first_step() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.handle(EVENTS[0])
    for step in (1, 2):
        console.tick(Snapshot(step, 1880, step / 192, 0.05))
    console.handle(LOGGED)
    console.tick(Snapshot(241, 1880, 1.26, 0.05))
    first, *rest = stream.getvalue().splitlines()[2:]
    assert re.fullmatch(r"epoch 0\.01 step 1/1880 first step after \d+\.\d s", first)
    assert rest == [LINES[2]]


def test_metrics_of_many_classes_are_summed_up() -> None:
    classes = {f"ap.class {number}": number / 80 for number in range(80)}
    few = {f"iou.{name}": 0.5 for name in "abc"}
    lines = lines_of(Evaluated(1, 0.1, "val", {"ap": 0.4938, **classes, **few}, 8), 10, 80, "ap")
    assert lines[1:] == [
        "   ap 0.4938  iou.a 0.5  iou.b 0.5  iou.c 0.5  ap.* mean 0.4938 of 80",
        "   ap.* highest class 79 0.988, class 78 0.975, class 77 0.963",
        "   ap.* lowest class 0 0, class 1 0.0125, class 2 0.025",
    ]


def test_a_repeated_warning_is_reported_once_with_a_count() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for step in range(120):
        console.handle(Note(f"step {step} left out", "warning"))
        console.handle(Note("another", "warning")) if step < 2 else None
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "step" in line] == [lines[0], *lines[2:]]
    assert len(lines) == 4
    assert ("step 0" in lines[0], "another" in lines[1]) == (True, True)
    assert ("step 9" in lines[2], "10 times" in lines[2]) == (True, True)
    assert ("step 99" in lines[3], "100 times" in lines[3]) == (True, True)


def test_notes_that_are_no_warnings_are_all_reported() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for _ in range(3):
        console.handle(Note("learning rate halved"))
    assert len(stream.getvalue().splitlines()) == 3


def test_the_default_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    show_run(Console())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == LINES


def test_a_dumb_terminal_gets_plain_lines(terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    show_run(Console(terminal.stream))
    assert terminal.text().splitlines() == LINES


def test_a_terminal_keeps_the_lines_and_the_bar_at_its_end(terminal: PseudoTerminal) -> None:
    console = Console(terminal.stream)
    for event in EVENTS[:-1]:
        console.handle(event)
    console.tick(Snapshot(1880, 1880, 9.79, 0.05))
    console.tick(Snapshot(1880, 1880, 9.79, 0.0, EvaluationProgress("test", 1, 3)))
    console.handle(EVENTS[-1])
    console.close()
    printed = [line for line in screen_lines(terminal.text()) if line]
    (bar,) = [line for line in printed if line not in LINES]
    assert [line for line in printed if line != bar] == LINES
    assert printed.index(bar) == LINES.index("finished at step 1880, epoch 9.79")
    assert re.match(r"━{20,40} 1880/1880 ", bar)


@pytest.mark.parametrize(("state", "where"), [("stopped", "at step 3"), ("failed", "after step 3")])
def test_a_run_that_is_not_finished_leaves_no_bar(terminal: PseudoTerminal, state: str, where: str) -> None:
    console = Console(terminal.stream)
    console.tick(Snapshot(3, 10, 0.5, 0.05))
    console.handle(Ended(state, 3, 0.5))
    assert [line for line in screen_lines(terminal.text()) if line] == [f"{state} {where}, epoch 0.5"]


def test_an_evaluation_has_a_bar_of_its_own_which_reaches_its_end(
    terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "SECONDS_BETWEEN_DRAWS", 3600.0)
    console = Console(terminal.stream)
    for done in range(1, 41):
        console.tick(Snapshot(5, 10, 0.5, 0.0, EvaluationProgress("test.ecssd", done, 40)))
    text = re.sub(r"\x1b\[[0-9;?]*m", "", terminal.text())
    assert "─" * 29 + " evaluating test.ecssd  1/40 batches" in text
    assert "━" * 30 + " evaluating test.ecssd  40/40 batches" in text
    assert "2/40" not in text


@pytest.mark.parametrize("number", range(12))
def test_a_line_of_a_log_interval_fits_80_columns(number: int) -> None:
    """Whatever is measured; the log file has all of it."""
    metrics = {"loss": 1234.5678, **{f"some_longer_metric_{each}": 0.123456 for each in range(number)}, "lr": 1.25e-5}
    clock = {**CLOCK, "slowest_rank": 3, "slowest_by": 1.5, "eta_seconds": 900000.0}
    event = Logged(123456, 1234.56, metrics, {}, clock)
    (line,), (whole,) = lines_of(event, 1234567, 80), lines_of(event, 1234567)
    assert len(line) <= 80
    assert line.startswith("epoch 1234.56 step 123456/1234567 loss 1235 ")
    assert "lr 1.25e-05" in line
    assert all(name in whole for name in metrics)
    assert "410 MB" in whole


def test_one_loss_is_printed_once_and_several_each() -> None:
    one = Logged(1, 0.1, {"loss": 0.5, "cross_entropy": 0.5, "grad_norm": 0.5})
    assert lines_of(one, 10)[0] == "epoch 0.10 step 1/10 loss 0.5 grad_norm 0.5"
    two = Logged(1, 0.1, {"loss": 0.75, "bce": 0.5, "cel": 0.25})
    assert lines_of(two, 10)[0] == "epoch 0.10 step 1/10 loss 0.75 bce 0.5 cel 0.25"
    lost = Evaluated(1, 0.1, "val", {"bce": float("nan"), "loss": float("nan"), "top1": 0.0}, 8)
    assert lines_of(lost, 10)[1] == "   loss nan  top1 0"


def test_the_bar_shows_how_far_the_run_is(terminal: PseudoTerminal) -> None:
    show_run(Console(terminal.stream))
    text = re.sub(r"\x1b\[[0-9;?]*m", "", terminal.text())
    assert "─ 243/1880  eta 0:01:10  5300/s  data-wait 2%  epoch 1.27  loss 0.412  lr 0.1  410 MB" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is there


def test_lines_are_printed_above_a_bar_that_stays(terminal: PseudoTerminal) -> None:
    console = Console(terminal.stream)
    console.tick(Snapshot(100, 1880, 0.5, 0.0))
    console.handle(Note("hello"))
    console.handle(Note("again"))
    *_, first, second, bar = screen_lines(terminal.text())
    assert (first, second) == ("hello", "again")
    assert "100/1880" in bar


def test_no_color_is_respected(terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    show_run(Console(terminal.stream))
    assert not re.search(r"\x1b\[[0-9;]*[349][0-7]m", terminal.text())


def test_nothing_is_drawn_between_two_due_draws(terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "SECONDS_BETWEEN_DRAWS", 3600.0)
    console = Console(terminal.stream)
    for step in range(1, 100):
        console.tick(Snapshot(step, 100, step / 10, 0.0))
    text = terminal.text()
    assert "1/100" in text
    assert "2/100" not in text


def test_letters_that_the_stream_lacks_are_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream).handle(Note("2 × 64"))
    assert raw.getvalue() == b"2 \\xd7 64\n"


def test_a_terminal_that_is_gone_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w")
    heard = io.StringIO()
    logger = LoggerGroup([Console(stream), Console(heard)])
    os.close(master)
    for step in range(1, 4):
        logger.tick(Snapshot(step, 100, step / 10, 0.0))
        logger.emit(Note(f"step {step}"))
    warning, *rest = heard.getvalue().splitlines()
    assert warning.startswith("warning: cannot write to Console: ")
    assert rest == ["step 1", "step 2", "step 3"]
    with contextlib.suppress(OSError):
        stream.close()


def test_the_bar_leaves_out_its_end_where_it_is_narrow() -> None:
    snapshot = Snapshot(250, 1880, 1.3, 0.05)
    widths = [len(status(snapshot, LOGGED, room)) for room in range(12, 100)]
    assert all(width <= room for width, room in zip(widths, range(12, 100), strict=True))
    assert status(snapshot, LOGGED, 100) == (
        "250/1880  eta 0:01:10  5300/s  data-wait 2%  epoch 1.30  loss 0.412  lr 0.1  410 MB"
    )
    assert status(snapshot, LOGGED, 69) == "250/1880  eta 0:01:10  5300/s  data-wait 2%  epoch 1.30  loss 0.412"
    assert status(snapshot, LOGGED, 40) == "250/1880  eta 0:01:10  5300/s"
    assert status(snapshot, LOGGED, 12) == "250/1880"


def test_the_time_left_shrinks_with_the_steps_left() -> None:
    logged = Logged(100, 1.0, {}, {}, {"eta_seconds": 900.0})
    assert "eta 0:07:30" in status(Snapshot(550, 1000, 5.5, 0.0), logged, 100)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (70, "0:01:10"), (3599.6, "1:00:00"), (90061, "1d 1:01:01")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.41234, "0.4123"), (0.1, "0.1"), (1e-5, "1e-05"), (12345.6, "12346"), (float("nan"), "nan")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
