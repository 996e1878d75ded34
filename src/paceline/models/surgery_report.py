"""The result of loading weights with surgery: what became of each tensor, or what does not match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.text import join_first

Shape = tuple[int, ...]
_MAX_LINES = 10
_MAX_NAMES = 3


@dataclass(frozen=True)
class Reshaped:
    """A tensor that was changed before it was loaded."""

    before: Shape
    after: Shape
    how: str


@dataclass(frozen=True)
class SurgeryReport:
    """Where each tensor of the weights and of the model ended."""

    loaded: list[str]
    """Loaded, the reshaped ones included."""
    reshaped: dict[str, Reshaped]
    replaced: dict[str, tuple[Shape, Shape]]
    """In both, but the model keeps its new ones, such as a head: shapes in the weights and in the model."""
    missing: list[str]
    """Not in the weights; the model keeps its random ones."""
    unexpected: list[str]
    """Not in the model."""
    excluded: list[str]
    """Excluded by the recipe, on either side."""

    def with_prefix(self, part: str, missing: list[str], unused: list[str]) -> SurgeryReport:
        """The report of the whole model: `missing` are its tensors outside the part, `unused` those of the file."""
        return SurgeryReport(
            [f"{part}.{name}" for name in self.loaded],
            {f"{part}.{name}": reshaped for name, reshaped in self.reshaped.items()},
            {f"{part}.{name}": shapes for name, shapes in self.replaced.items()},
            [*(f"{part}.{name}" for name in self.missing), *missing],
            unused,
            [f"{part}.{name}" for name in self.excluded],
        )

    def summary(self) -> list[str]:
        """A short table, one line for each kind."""
        rows: dict[str, list[str]] = {
            "reshaped": [f"{name} {_describe(one)}" for name, one in self.reshaped.items()],
            "replaced": [f"{name} {_change(*shapes)}" for name, shapes in self.replaced.items()],
            "missing": self.missing,
            "unexpected": self.unexpected,
            "excluded": self.excluded,
        }
        return [
            _row("loaded", len(self.loaded), []),
            *(_row(title, len(rows[title]), rows[title]) for title in rows if rows[title]),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        reshaped = {n: {"weights": [*r.before], "model": [*r.after], "how": r.how} for n, r in self.reshaped.items()}
        replaced = {name: {"weights": [*old], "model": [*new]} for name, (old, new) in self.replaced.items()}
        return {
            "loaded": self.loaded,
            "reshaped": reshaped,
            "replaced": replaced,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "excluded": self.excluded,
        }


@dataclass
class Mismatch:
    """Differences between weights and model that no declared surgery explains."""

    shapes: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    missing: dict[str, Shape] = field(default_factory=dict)
    unexpected: dict[str, Shape] = field(default_factory=dict)

    def check(self, own: Mapping[str, Tensor]) -> None:
        """Raise a CheckpointError with every kind of difference, if there is one."""
        kinds = {
            "with another shape (weights → model)": [f"{n} {_change(*shapes)}" for n, shapes in self.shapes.items()],
            "missing from the weights": [f"{name} {list(shape)}" for name, shape in self.missing.items()],
            "not in the model": [f"{name} {list(shape)}" for name, shape in self.unexpected.items()],
        }
        lines = []
        for kind, names in kinds.items():
            if names:
                lines += [f"  {len(names)} {kind}:", *(f"    {name}" for name in names[:_MAX_LINES])]
                lines += [f"    and {len(names) - _MAX_LINES} more"] if len(names) > _MAX_LINES else []
        if lines:
            raise CheckpointError("\n".join(["the weights do not match the model:", *lines, *self._advice(own)]))

    def _advice(self, own: Mapping[str, Tensor]) -> list[str]:
        """The prefix to strip that would explain most of the unexpected names, if there is one."""
        prefixes: dict[str, int] = {}
        for name in self.unexpected:
            parts = name.split(".")
            for end in range(1, len(parts)):
                if ".".join(parts[end:]) in own:
                    prefix = ".".join(parts[:end])
                    prefixes[prefix] = prefixes.get(prefix, 0) + 1
        prefix = max(prefixes, key=lambda one: prefixes[one], default="")
        if prefixes.get(prefix, 0) * 2 < len(self.unexpected) or not prefix:
            return []
        return [
            f"  add weights.strip: [{prefix}]; {prefixes[prefix]} of these names are in the model without that prefix"
        ]


def _describe(one: Reshaped) -> str:
    return f"({one.how})" if one.before == one.after else f"{_change(one.before, one.after)} ({one.how})"


def _change(before: Shape, after: Shape) -> str:
    return f"{list(before)} → {list(after)}"


def _row(title: str, count: int, names: list[str]) -> str:
    tensors = "tensor " if count == 1 else "tensors"
    return f"{title:<10} {count:>5} {tensors}  {join_first(names, _MAX_NAMES)}".rstrip()
