"""Format events as text, the same for the terminal and log files except for styles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from paceline.core.class_metrics import HEADER, split_classes, summarize
from paceline.core.text import doubled_loss, pluralize
from paceline.loggers.events import Ended, Evaluated, Event, Logged, Note, Saved, Snapshot, Started, Visualized

Words = list[tuple[str, str]]
"""A line as pairs of text and style; plain output ignores styles."""
_STATE_STYLES = {"finished": "bold green", "stopped": "bold yellow", "failed": "bold red"}
_WORTH_SAYING = 1.1  # times the mean that the slowest process needs


def lines_of(event: Event, total_steps: int, width: int | None = None, main_metric: str | None = None) -> list[Words]:
    """The lines of an event; of its metrics those that fit in `width` columns, the main one first."""
    match event:
        case Started():
            return _started(event)
        case Logged():
            return [_fitted([_labeled(*pair) for pair in _logged(event, total_steps)], " ", width)]
        case Evaluated():
            return _evaluated(event, width, main_metric)
        case Saved():
            best = [(", the best so far", "green")] if event.is_best else []
            return [[("saved ", "dim"), (str(event.path), ""), *best]]
        case Visualized():
            return []
        case Note():
            label = [("warning: ", "yellow")] if event.level == "warning" else []
            return [[*label, (event.text, "")]]
        case Ended():
            at = "after" if event.state == "failed" else "at"  # the next step may be what failed
            where = f" {at} step {event.step}, epoch {number(event.epoch)}"
            first = [(event.state, _STATE_STYLES.get(event.state, "bold")), (where, "")]
            reason = [] if event.reason is None else [event.reason]
            return [first, *([(f"  {line}", "")] for line in (*reason, *event.lines))]


def plain(words: Words) -> str:
    """A line without its styles."""
    return "".join(text for text, _ in words)


def status(snapshot: Snapshot, logged: Logged | None, room: int) -> Words:
    """The text beside the progress bar in at most `room` columns; the last parts are dropped first."""
    if snapshot.evaluation is not None:
        split, done, total = snapshot.evaluation
        return [("evaluating ", "dim"), (split, "bold"), (f"  {done}/{total} batches", "")]
    metrics, clock = (logged.metrics, logged.clock) if logged else ({}, {})
    parts: list[Words] = [[(f"{snapshot.step}/{snapshot.total_steps}", "bold")]]
    if logged and _known(clock, "eta_seconds") and snapshot.total_steps > logged.step:
        share = (snapshot.total_steps - snapshot.step) / (snapshot.total_steps - logged.step)
        parts.append(_labeled("eta", duration(clock["eta_seconds"] * share)))
    if _known(clock, "samples_per_second"):
        parts.append([(_speed(clock), ""), ("/s", "dim")])
    # That of the log interval, where it is known, so that it does not flicker.
    wait = clock["data_wait"] if _known(clock, "data_wait") else snapshot.data_wait
    parts += [_labeled("data-wait", f"{wait:.0%}"), _labeled("epoch", f"{snapshot.epoch:.2f}")]
    if logged:
        parts += [_labeled(name, number(_display_value(logged, name))) for name in ("loss", "lr") if name in metrics]
    if _known(clock, "memory_mb"):
        parts.append([(f"{clock['memory_mb']:.0f} MB", "")])
    return _fitted(parts, "  ", room)


def first_step(snapshot: Snapshot, seconds: float) -> Words:
    """The line of the first step, which took so long with all that comes before it."""
    about = {"epoch": f"{snapshot.epoch:.2f}", "step": f"{snapshot.step}/{snapshot.total_steps}"}
    return _fitted([_labeled(*pair) for pair in [*about.items(), ("first step after", f"{seconds:.1f} s")]], " ", None)


def number(value: float) -> str:
    """Format with four significant digits; large numbers in full."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format as hours, minutes and seconds: 0:01:10; with days if there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d " * bool(days) + f"{hour}:{minute:02d}:{second:02d}"


def _started(event: Started) -> list[Words]:
    processes = f" in {event.world} processes" * (event.world > 1)
    about = (
        f": {pluralize(event.total_steps, 'step')}, {event.steps_per_epoch:,} per epoch, on {event.device}{processes}"
    )
    lines: list[Words] = [[(event.name, "bold"), (about, ""), (", into ", "dim"), (str(event.out), "")]]
    if event.resumed_step:
        lines.append([(f"  resumes after step {event.resumed_step:,}", "")])
    return lines + [[(f"  {line}", "")] for line in event.lines]


def _logged(event: Logged, total_steps: int) -> list[tuple[str, str]]:
    """The names and values of a line, the most important first."""
    clock = event.clock
    pairs = [("epoch", f"{event.epoch:.2f}"), ("step", f"{event.step}/{total_steps}")]
    hidden = doubled_loss(event.metrics)
    metrics = [(name, number(_display_value(event, name))) for name in event.metrics if name != hidden]
    pairs += [each for each in metrics if each[0] in ("loss", "lr")]
    if _known(clock, "samples_per_second"):
        pairs.append(("samples/s", _speed(clock)))
    if _known(clock, "eta_seconds"):
        pairs.append(("eta", duration(clock["eta_seconds"])))
    pairs += [each for each in metrics if each not in pairs]
    if _known(clock, "data_wait"):
        pairs.append(("data-wait", f"{clock['data_wait']:.0%}"))
    if _known(clock, "slowest_rank") and clock["slowest_by"] >= _WORTH_SAYING:
        pairs.append(("slowest", f"rank {clock['slowest_rank']}, {clock['slowest_by']:.2f} × the mean"))
    if _known(clock, "memory_mb"):
        pairs.append(("mem", f"{clock['memory_mb']:.0f} MB"))
    return pairs


def _fitted(parts: Sequence[Words], space: str, width: int | None) -> Words:
    """As many of the parts as a line of `width` columns has room for, at least the first."""
    words = list(parts[0])
    for part in parts[1:]:
        longer = [*words, (space, ""), *part]
        if width is not None and len(plain(longer)) > width:
            break
        words = longer
    return words


def _evaluated(event: Evaluated, width: int | None, main_metric: str | None) -> list[Words]:
    """A line that stands out, and the metrics below it, as many in a line as there is room for."""
    skipped = f", {event.num_skipped:,} skipped" * (event.num_skipped > 0)
    seconds = f" in {event.clock['seconds']:.1f} s" if _known(event.clock, "seconds") else ""
    about = f" at step {event.step}: {pluralize(event.num_samples, 'sample')}{skipped}{seconds}"
    lines: list[Words] = [[("== ", "bold cyan"), (event.split, "bold cyan"), (about, "cyan")]]
    hidden = doubled_loss(event.metrics)
    names, by_class = split_classes(name for name in event.metrics if name != hidden)
    metrics = [(name, number(event.metrics[name])) for name in sorted(names, key=lambda name: name != main_metric)]
    for each in by_class:
        values = summarize(event.metrics, each)
        metrics += [(f"{each}.* {what}", text) for what, text in zip(HEADER, values, strict=True) if text]
    for name, value in metrics:
        metric = [(f"{name} ", ""), (value, "bold green" if name == main_metric else "bold")]
        room = sys.maxsize if width is None else width
        if len(lines) == 1 or len(plain(lines[-1])) + 2 + len(plain(metric)) > room:
            lines.append([("   ", ""), *metric])
        else:
            lines[-1] += [("  ", ""), *metric]
    return lines


def _display_value(event: Logged, name: str) -> float:
    """The median of the window, which is smoother; the latest value of the learning rate."""
    latest = event.metrics[name]
    return latest if name == "lr" else event.smoothed.get(name, {}).get("median", latest)


def _speed(clock: dict[str, Any]) -> str:
    return number(float(f"{clock['samples_per_second']:.3g}"))  # more digits would only flicker


def _known(clock: dict[str, Any], name: str) -> bool:
    return clock.get(name) is not None


def _labeled(label: str, value: str) -> Words:
    return [(f"{label} ", "dim"), (value, "")]
