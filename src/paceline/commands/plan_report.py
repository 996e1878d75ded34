"""The answer of `paceline plan`: tables, JSON and an image."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.loggers.tables import print_table
from paceline.plan.cost import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, DEVICES_OF_A_MACHINE, LINK_EFFICIENCY, NETWORK
from paceline.plan.devices import Device, Speed
from paceline.plan.memory import CATEGORIES
from paceline.plan.rows import Estimate, Refused, Row, Unrehearsed, estimate

if TYPE_CHECKING:
    from paceline.commands.measure_row import Measured

_UNIT = 2**20
_SHORT = {"train.precision": "precision", "train.activation_checkpointing": "checkpointing"}


@dataclass
class Report:
    """The rows of a plan, and what they are compared with."""

    recipe: str
    device: Device
    results: Sequence[Row | Refused]
    samples_per_second: float | None = None
    """How fast this machine loads samples; None if the data is not here."""
    measured: dict[int, Measured | str] = field(default_factory=dict)
    """What real steps took, by the row's place; why there were none, if there were none."""

    @property
    def rows(self) -> list[Row]:
        """The combinations that are possible."""
        return [each for each in self.results if isinstance(each, Row)]

    @property
    def refused(self) -> list[Refused]:
        """Those that are not."""
        return [each for each in self.results if isinstance(each, Refused)]

    def print(self) -> None:
        """Print the tables, then what was refused and what to change first."""
        if self.rows:
            self._print_memory()
        if self.rows and self.device.speed:
            self._print_time(self.device.speed)
        if self.measured:
            self._print_measured()
        for refused in self.refused:
            found = "not planned" if isinstance(refused, Unrehearsed) else "not possible"
            print(f"{found}: {refused}: {refused.reason}", file=sys.stderr)
        if line := _advice(self.rows, self.device.memory):
            print(line)

    def as_json(self) -> dict[str, Any]:
        """The answer of --json: bytes and seconds."""
        speed = self.device.speed
        assumed = {
            "compute_efficiency": COMPUTE_EFFICIENCY,
            "bandwidth_efficiency": BANDWIDTH_EFFICIENCY,
            "link_efficiency": LINK_EFFICIENCY,
            "network": NETWORK,
        }
        return {
            "device": self.device.name,
            "memory": self.device.memory,
            "speed": None if speed is None else {**asdict(speed), **assumed},
            "loader_samples_per_second": self.samples_per_second,
            "rows": [self._row_as_json(place, each) for place, each in enumerate(self.results)],
        }

    def save_image(self, path: Path) -> None:
        """Draw the memory of each row by its parts, with the limit of the device."""
        from paceline.visualize.charts import draw_stacked_bars
        from paceline.visualize.image import save_png

        labels = [", ".join(map(str, self._cells(row))) for row in self.rows]
        scale, unit = (2**30, "GiB") if max(row.shared_bytes for row in self.rows) >= 2**30 else (_UNIT, "MiB")
        parts: dict[str, list[float]] = {
            part: [row.num_sharing * row.memory.parts[part] / scale for row in self.rows] for part in CATEGORIES
        }
        name = self.device.name if self.device.speed else "limit"  # a size is its own name
        limit = self.device.memory / scale
        whose = "all processes" if self._is_shared else "each device"
        title = f"{self.recipe}: memory of {whose}; {name}: {_number(limit)} {unit}"
        axis = f"{unit} of tensors, by {', '.join(self._header())}"
        save_png(draw_stacked_bars(labels, parts, title, axis, limit), path)

    def _header(self) -> list[str]:
        return [*(_SHORT.get(key, key.rpartition(".")[2]) for key in self.results[0].settings), "micro-batch"]

    @property
    def _is_shared(self) -> bool:
        """Whether processes of a row share the memory of the device."""
        return any(row.num_sharing > 1 for row in self.rows)

    def _cells(self, row: Row | Unrehearsed) -> list[str]:
        return [*row.settings.values(), str(row.micro_batch_size)]

    def _print_memory(self) -> None:
        limit = self.device.memory
        named = ["phase"] if any(row.phase.name != "training" for row in self.rows) else []
        whose, shared = ("process", ["all processes"]) if self._is_shared else ("device", [])
        print(
            f"memory of each {whose}, MiB of tensors; {self.device.name}: {_size(limit)} MiB"
            + ", which all processes of a row share" * self._is_shared
        )
        print_table(
            [*self._header(), "memory", *shared, "fits", "largest", *CATEGORIES, *named],
            [
                [
                    *(*self._cells(row), _size(row.memory.total), *(_size(row.shared_bytes) for _ in shared)),
                    *("yes" if row.fits(limit) else "no", f"{row.largest_micro_batch:,}"),
                    *(_size(row.memory.parts[part]) for part in CATEGORIES),
                    *(row.phase.name for _ in named),
                ]
                for row in self.rows
            ],
        )

    def _print_time(self, speed: Speed) -> None:
        shares = f"{COMPUTE_EFFICIENCY:.0%} of its operations and {BANDWIDTH_EFFICIENCY:.0%} of its bandwidth"
        print(f"\nestimated time on {self.device.name}, {speed.source}: {shares} are assumed to be reached")
        rows = []
        for row in self.rows:
            found = estimate(row, speed, self.samples_per_second)
            samples = row.micro_batch_size * row.num_micro_batches / max(found.step, found.communication or 0.0)
            work = [_number(row.step.cost.flops / 1e9), _number(row.step.cost.bytes / 1e9)]
            run = "–" if found.run is None else _duration(found.run)
            times = [_milliseconds(found.step), _milliseconds(found.communication)]
            rows.append([*self._cells(row), *work, *times, _number(samples), run, found.bound])
        header = ["GFLOP/step", "GB/step", "ms/step", "ms/exchange", "samples/s each", "run", "bound by"]
        print_table([*self._header(), *header], rows)
        if self.samples_per_second is None:
            print("the loader was not measured, since the data is not here")
        else:
            most = f"up to {DEVICES_OF_A_MACHINE} processes share its cores"
            print(f"this machine loads {self.samples_per_second:,.0f} samples/s; {most}")
        if speed.link and any(row.processes > 1 for row in self.rows):
            links = f"{speed.link / 1e9:,.0f} GB/s, {NETWORK / 1e9:,.0f} GB/s beyond {DEVICES_OF_A_MACHINE} processes"
            print(f"exchange, beside computing: {LINK_EFFICIENCY:.0%} of {links}")

    def _print_measured(self) -> None:
        gap = "\n" if self.rows else ""  # below the tables above
        print(f"{gap}predicted beside measured, each row in fresh processes on the device at hand; MiB and ms")
        rows = []
        for place, row in enumerate(self.results):
            if not isinstance(row, Row | Unrehearsed):
                continue
            found, predicted = self.measured[place], row.memory.total if isinstance(row, Row) else None
            if isinstance(found, str):
                rows.append([*self._cells(row), _size(predicted), found, *[""] * 5])
                continue
            times = self._estimate(row) if isinstance(row, Row) else None
            rows.append(
                [
                    *self._cells(row),
                    *(_size(predicted), _size(found.tensor_bytes), _error(predicted, found.tensor_bytes)),
                    *(_size(found.resident_bytes), _error(predicted, found.resident_bytes)),
                    *(_milliseconds(times and times.step), _milliseconds(found.step_seconds)),
                ]
            )
        header = ["predicted", "tensors", "error", "resident", "error", "step, estimated", "step"]
        print_table([*self._header(), *header], rows)

    def _estimate(self, row: Row) -> Estimate | None:
        speed = self.device.speed
        return None if speed is None else estimate(row, speed, self.samples_per_second)

    def _row_as_json(self, place: int, row: Row | Refused) -> dict[str, Any]:
        found = self.measured.get(place)
        measured = found._asdict() if isinstance(found, tuple) else found
        if isinstance(row, Refused):
            refused = {"settings": dict(row.settings), "reason": row.reason}
            return refused | ({"measured": measured} if isinstance(row, Unrehearsed) else {})
        times = self._estimate(row)
        return {
            "settings": dict(row.settings),
            "micro_batch_size": row.micro_batch_size,
            "num_micro_batches": row.num_micro_batches,
            "bytes": dict(row.memory.parts),
            "total_bytes": row.memory.total,
            "phase": row.phase.name,
            "phases": {phase.name: phase.memory.total for phase in [*row.training, *row.evaluations]},
            "shared_bytes": row.shared_bytes,
            "fits": row.fits(self.device.memory),
            "largest_micro_batch": row.largest_micro_batch,
            "changes_to_fit": row.changes_to_fit(self.device.memory),
            "flops": row.step.cost.flops,
            "moved_bytes": row.step.cost.bytes,
            "sent_bytes": row.step.sent_bytes,
            "estimated": times
            and {
                "step_seconds": times.step,
                "communication_seconds": times.communication,
                "run_seconds": times.run,
                "bound": times.bound,
            },
            "measured": measured,
        }


def _advice(rows: Sequence[Row], limit: int) -> str:
    """What to change first when nothing fits; empty if something does."""
    if not rows or any(row.fits(limit) for row in rows):
        return ""
    possible = [(row, changes) for row in rows if (changes := row.changes_to_fit(limit)) is not None]
    if possible:
        best, changes = max(possible, key=lambda each: (each[0].largest_micro_batch or 0, -each[0].memory.total))
        is_chosen = len({row.processes for row in rows}) > 1
        words = " ".join([*[f"--procs {best.processes}"] * is_chosen, *best.overrides, *changes])
        return f"nothing fits as it is; this does: {words}"
    least = min(rows, key=lambda row: row.memory.total)
    part = max(least.memory.parts, key=lambda each: least.memory.parts[each])
    passes = part in ("activations", "temporaries")
    hint = "use smaller images" if passes else "use train.strategy=fsdp with more processes, or a smaller model"
    return f"nothing fits, not even batches of one sample; {part} are the most: {hint}"


def _size(number: int | None) -> str:
    if number is None:
        return "–"
    return f"{number / _UNIT:,.0f}" if number >= 10 * _UNIT else f"{number / _UNIT:,.1f}"


def _error(predicted: int | None, measured: int) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted is not None and measured > 0 else "–"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else _number(1000 * seconds)


def _number(value: float) -> str:
    """Three digits at least, and never an exponent of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{_number(seconds / length)} {unit}"
    return f"{_number(seconds)} s"
