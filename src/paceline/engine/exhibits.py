"""Samples of an evaluation that are drawn with their predictions: spread over the split, whoever measured them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.counting import spread
from paceline.core.mesh import Mesh
from paceline.data.batch import Batch
from paceline.metrics.state import State, pack, unpack
from paceline.tasks.task import Glimpses

_UNLESS_TOLD = 8


class Exhibit(NamedTuple):
    """What is kept of one sample: as much as its picture needs, as a batch of one, on the host."""

    sample: int
    seen: tuple[Batch, Any]
    """The batch and its predictions."""


def drawn(size: int, task: object) -> Collection[int]:
    """The samples of a split that are drawn: as many as the task says, evenly apart, always the same ones."""
    return set(spread(size, getattr(task, "num_pictured", _UNLESS_TOLD)))


def pick(wanted: Collection[int], task: object, batch: Batch, predictions: Any) -> list[Exhibit]:
    """Those samples of a batch that are drawn; none if predictions are of a kind that cannot be taken apart."""
    rows = [(row, sample) for row, sample in enumerate(batch.ids.tolist()) if sample in wanted]
    found: list[Exhibit] = []
    for row, sample in rows:
        try:
            seen = _taken(batch, row, batch.size), _taken(predictions, row, batch.size)
        except TypeError:
            return []
        shown = task.glimpse(*seen) if isinstance(task, Glimpses) else seen
        found.append(Exhibit(sample, _with_leaves(shown, (leaf.detach().cpu().clone() for leaf in _leaves(shown)))))
    return found


def assemble(mesh: Mesh, kept: Sequence[Exhibit]) -> tuple[Batch, Any] | None:
    """What all processes kept as one batch with its predictions, in the order of the samples; on the first process.

    Where images, or anything else, differ in their sizes there is a list of them in place of a tensor. None if the
    first process kept nothing: the first sample of a split is drawn, and is its own unless it cannot be read.
    """
    sent = {} if mesh.is_main else {name: leaf for each in kept for name, leaf in _named_leaves(each)}
    received: dict[int, State] = {}
    for part in mesh.gather(pack(sent)):
        for name, leaf in unpack(part).items():
            received.setdefault(int(name.split(".")[0]), {})[name] = leaf
    if not mesh.is_main or not kept:
        return None
    shape = kept[0].seen
    seen = {each.sample: each.seen for each in kept} | {
        sample: _with_leaves(shape, iter(leaves.values())) for sample, leaves in received.items()
    }
    batch, predictions = _joined([seen[sample] for sample in sorted(seen)])
    return Batch(batch), predictions


def _named_leaves(exhibit: Exhibit) -> Iterator[tuple[str, Tensor]]:
    for number, leaf in enumerate(_leaves(exhibit.seen)):
        yield f"{exhibit.sample}.{number:06d}", leaf.contiguous()


def _taken(value: Any, row: int, size: int) -> Any:
    """One sample of what belongs to `size` of them, in the same shape."""
    match value:
        case Tensor():
            return value[row : row + 1] if value.ndim and len(value) == size else value
        case list():
            return value[row : row + 1] if len(value) == size else value
        case tuple() | dict() | str() | int() | float() | None:
            return _mapped(value, lambda each: _taken(each, row, size))
        case _:
            raise TypeError


def _joined(values: list[Any]) -> Any:
    """Batches of one, in one."""
    first = values[0]
    match first:
        case Tensor():
            if not first.ndim:
                return first
            alike = len({each.shape[1:] for each in values}) == 1
            return torch.cat(values) if alike else [each[0] for each in values]
        case list():
            return [each for value in values for each in value]
        case tuple():
            return _tuple_like(first, [_joined(list(each)) for each in zip(*values, strict=True)])
        case dict():
            return {name: _joined([value[name] for value in values]) for name in first}
        case _:
            return first


def _leaves(value: Any) -> Iterator[Tensor]:
    """All tensors, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)


def _with_leaves(value: Any, leaves: Iterator[Tensor]) -> Any:
    """The same with other tensors."""
    return next(leaves) if isinstance(value, Tensor) else _mapped(value, lambda each: _with_leaves(each, leaves))


def _mapped(value: Any, function: Any) -> Any:
    match value:
        case list():
            return [function(each) for each in value]
        case tuple():
            return _tuple_like(value, [function(each) for each in value])
        case Batch():
            return Batch({name: function(each) for name, each in value.items()})
        case dict():
            return {name: function(each) for name, each in value.items()}
        case _:
            return value


def _tuple_like(value: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    """A tuple of these, with the names that the given one has."""
    made: tuple[Any, ...] = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return made
