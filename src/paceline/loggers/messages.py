"""Format events as text, the same for the terminal and log files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from paceline.core.text import doubled_loss, pluralize
from paceline.loggers.events import Ended, Evaluated, Event, Logged, Note, Saved, Snapshot, Started, Visualized
from paceline.metrics.class_metrics import HEADER, split_classes, summarize

_WORTH_SAYING = 1.1  # times the mean that the slowest process needs


def lines_of(event: Event, total_steps: int, width: int | None = None, main_metric: str | None = None) -> list[str]:
    """The lines of an event; of its metrics those that fit in `width` columns, the main one first."""
    match event:
        case Started():
            return _started(event)
        case Logged():
            return [_fitted(_logged(event, total_steps), " ", width)]
        case Evaluated():
            return _evaluated(event, width, main_metric)
        case Saved():
            return [f"saved {event.path}" + ", the best so far" * event.is_best]
        case Visualized():
            return []
        case Note():
            return ["warning: " * (event.level == "warning") + event.text]
        case Ended():
            at = "after" if event.state == "failed" else "at"  # the next step may be what failed
            first = f"{event.state} {at} step {event.step}, epoch {number(event.epoch)}"
            reason = [] if event.reason is None else [event.reason]
            return [first, *(f"  {line}" for line in (*reason, *event.lines))]


def status(snapshot: Snapshot, logged: Logged | None, room: int) -> str:
    """The text beside the progress bar in at most `room` columns; the last parts are dropped first."""
    if snapshot.evaluation is not None:
        split, done, total = snapshot.evaluation
        return f"evaluating {split}  {done}/{total} batches"
    metrics, clock = (logged.metrics, logged.clock) if logged else ({}, {})
    parts = [f"{snapshot.step}/{snapshot.total_steps}"]
    if logged and _known(clock, "eta_seconds") and snapshot.total_steps > logged.step:
        share = (snapshot.total_steps - snapshot.step) / (snapshot.total_steps - logged.step)
        parts.append(f"eta {duration(clock['eta_seconds'] * share)}")
    if _known(clock, "samples_per_second"):
        parts.append(f"{_speed(clock)}/s")
    # That of the log interval, where it is known, so that it does not flicker.
    wait = clock["data_wait"] if _known(clock, "data_wait") else snapshot.data_wait
    parts += [f"data-wait {wait:.0%}", f"epoch {snapshot.epoch:.2f}"]
    if logged:
        parts += [f"{name} {number(_display_value(logged, name))}" for name in ("loss", "lr") if name in metrics]
    if _known(clock, "memory_mb"):
        parts.append(f"{clock['memory_mb']:.0f} MB")
    return _fitted(parts, "  ", room)


def first_step(snapshot: Snapshot, seconds: float) -> str:
    """The line of the first step, which took so long with all that comes before it."""
    place = f"epoch {snapshot.epoch:.2f} step {snapshot.step}/{snapshot.total_steps}"
    return f"{place} first step after {seconds:.1f} s"


def number(value: float) -> str:
    """Format with four significant digits; large numbers in full."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format as hours, minutes and seconds: 0:01:10; with days if there are any."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d " * bool(days) + f"{hour}:{minute:02d}:{second:02d}"


def _started(event: Started) -> list[str]:
    steps = f"{pluralize(event.total_steps, 'step')}, {event.steps_per_epoch:,} per epoch"
    processes = f" in {event.world} processes" * (event.world > 1)
    resumed = [f"  resumes after step {event.resumed_step:,}"] if event.resumed_step else []
    first = f"{event.name}: {steps}, on {event.device}{processes}, into {event.out}"
    return [first, *resumed, *(f"  {line}" for line in event.lines)]


def _logged(event: Logged, total_steps: int) -> list[str]:
    """The parts of a line, the most important first."""
    clock, hidden = event.clock, doubled_loss(event.metrics)
    metrics = {name: f"{name} {number(_display_value(event, name))}" for name in event.metrics if name != hidden}
    parts = [f"epoch {event.epoch:.2f}", f"step {event.step}/{total_steps}"]
    parts += [metrics.pop(name) for name in ("loss", "lr") if name in metrics]
    if _known(clock, "samples_per_second"):
        parts.append(f"samples/s {_speed(clock)}")
    if _known(clock, "eta_seconds"):
        parts.append(f"eta {duration(clock['eta_seconds'])}")
    parts += metrics.values()
    if _known(clock, "data_wait"):
        parts.append(f"data-wait {clock['data_wait']:.0%}")
    if _known(clock, "slowest_rank") and clock["slowest_by"] >= _WORTH_SAYING:
        parts.append(f"slowest rank {clock['slowest_rank']}, {clock['slowest_by']:.2f} × the mean")
    if _known(clock, "memory_mb"):
        parts.append(f"mem {clock['memory_mb']:.0f} MB")
    return parts


def _fitted(parts: Sequence[str], space: str, width: int | None) -> str:
    """As many of the parts as a line of `width` columns has room for, at least the first."""
    line = parts[0]
    for part in parts[1:]:
        if width is not None and len(line) + len(space) + len(part) > width:
            break
        line += space + part
    return line


def _evaluated(event: Evaluated, width: int | None, main_metric: str | None) -> list[str]:
    """A line that stands out, and the metrics below it, as many in a line as there is room for."""
    skipped = f", {event.num_skipped:,} skipped" * (event.num_skipped > 0)
    seconds = f" in {event.clock['seconds']:.1f} s" if _known(event.clock, "seconds") else ""
    lines = [f"== {event.split} at step {event.step}: {pluralize(event.num_samples, 'sample')}{skipped}{seconds}"]
    hidden = doubled_loss(event.metrics)
    names, by_class = split_classes(name for name in event.metrics if name != hidden)
    metrics = [f"{name} {number(event.metrics[name])}" for name in sorted(names, key=lambda name: name != main_metric)]
    for each in by_class:
        values = summarize(event.metrics, each)
        metrics += [f"{each}.* {what} {text}" for what, text in zip(HEADER, values, strict=True) if text]
    for metric in metrics:
        if len(lines) == 1 or len(lines[-1]) + 2 + len(metric) > (width or sys.maxsize):
            lines.append(f"   {metric}")
        else:
            lines[-1] += f"  {metric}"
    return lines


def _display_value(event: Logged, name: str) -> float:
    """The median of the window, which is smoother; the latest value of the learning rate."""
    latest = event.metrics[name]
    return latest if name == "lr" else event.smoothed.get(name, {}).get("median", latest)


def _speed(clock: dict[str, Any]) -> str:
    return number(float(f"{clock['samples_per_second']:.3g}"))  # more digits would only flicker


def _known(clock: dict[str, Any], name: str) -> bool:
    return clock.get(name) is not None
