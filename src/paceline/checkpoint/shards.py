"""Parts of tensors that several processes keep: who writes which, and how they become whole again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError

Places = Mapping[str, tuple[tuple[int, ...], int]]
"""Of each part its tensor's full shape and its first row, by name."""
_NAMES = re.compile(r"(?:model|state)-(\d{5})-of-(\d{5})\.safetensors|part-(\d{5})-of-(\d{5})\.json")


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor: those of `full_shape` from `start` on, along the first dimension."""

    tensor: Tensor
    full_shape: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if not self.full_shape or shape[1:] != tuple(self.full_shape[1:]) or len(shape) != len(self.full_shape):
            raise ValueError(f"a part of shape {shape} does not fit a tensor of shape {tuple(self.full_shape)}")
        if self.start < 0 or self.start + shape[0] > self.full_shape[0]:
            raise ValueError(f"rows {self.start} to {self.start + shape[0]} are outside of shape {self.full_shape}")

    def detach(self) -> Part:
        """The same without its history, as a tensor has it."""
        return replace(self, tensor=self.tensor.detach())


@dataclass(frozen=True)
class Share:
    """Which of the processes that write a checkpoint together this is.

    `attempt` is one word that all of them know and that no other save has: what an interrupted save left behind is
    told from this one by it.
    """

    rank: int = 0
    world: int = 1
    attempt: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not one of {self.world} processes")

    @property
    def names(self) -> tuple[str, str, str]:
        """What its files are called: the model's, the state's, and the one that describes both."""
        return part_names(self.rank, self.world)


def part_names(rank: int, world: int) -> tuple[str, str, str]:
    """What the files of one of several processes are called."""
    of = f"{rank + 1:05d}-of-{world:05d}"
    return f"model-{of}.safetensors", f"state-{of}.safetensors", f"part-{of}.json"


def is_part_name(name: str) -> bool:
    """Whether a file of this name would be one of several processes'."""
    return _NAMES.fullmatch(name) is not None


def world_of(names: Iterable[str]) -> int:
    """How many processes wrote files of these names together; 1 if they are not called so."""
    found = {match[2] or match[4] for name in names if (match := _NAMES.fullmatch(name))}
    return int(found.pop()) if len(found) == 1 else 1


def divide(leaves: Mapping[str, Tensor | Part], share: Share) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """The tensors that this process writes, and the place of those that are parts: full shape and first row.

    Tensors that every process has all of are left to the first.
    """
    mine: dict[str, Tensor] = {}
    places: dict[str, list[Any]] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, Part):
            if share.world == 1 and leaf.tensor.shape != leaf.full_shape:
                raise ValueError(f"{name}: is a part of a tensor, but one process alone saves it")
            mine[name] = leaf.tensor
            places[name] = [list(leaf.full_shape), leaf.start]
        elif share.rank == 0:
            mine[name] = leaf
    return mine, places


def read_places(file: str, value: Any) -> dict[str, Places]:
    """The places that a process has written down for its parts of the model and of the state, checked."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected the places of parts, found {repr(value)[:60]}")
    return {kind: _places(file, kind, value.get(kind)) for kind in ("model", "state")}


def _places(file: str, kind: str, value: Any) -> Places:
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected the places of the {kind}'s parts, found {repr(value)[:60]}")
    return {name: _place(f"{file}: {name[:100]}", place) for name, place in value.items()}


def _place(what: str, value: Any) -> tuple[tuple[int, ...], int]:
    shape, start = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if not isinstance(shape, list) or not all(type(number) is int and number >= 0 for number in (*shape, start)):
        raise CheckpointError(f"{what}: expected a shape and a row, found {repr(value)[:60]}")
    return tuple(shape), int(start or 0)


def assemble(files: Iterable[tuple[Mapping[str, Tensor], Places]]) -> dict[str, Tensor]:
    """Whole tensors from what `divide` gave each process, in memory of their own."""
    whole: dict[str, Tensor] = {}
    pieces: dict[str, list[Part]] = {}
    for tensors, places in files:
        if lost := sorted(places.keys() - tensors.keys()):
            raise CheckpointError(f"of tensor {lost[0]!r} a part is missing")
        for name, tensor in tensors.items():
            if name in places:
                pieces.setdefault(name, []).append(_part(name, tensor, *places[name]))
            elif name in whole:
                raise CheckpointError(f"tensor {name!r} was saved twice")
            else:
                whole[name] = tensor.clone()
    if both := sorted(whole.keys() & pieces.keys()):
        raise CheckpointError(f"tensor {both[0]!r} was saved whole and in parts")
    return whole | {name: _joined(name, found) for name, found in pieces.items()}


def _part(name: str, tensor: Tensor, full_shape: tuple[int, ...], start: int) -> Part:
    try:
        return Part(tensor, full_shape, start)
    except ValueError as error:
        raise CheckpointError(f"tensor {name!r}: {error}") from error


def _joined(name: str, parts: list[Part]) -> Tensor:
    parts.sort(key=lambda part: (part.start, len(part.tensor)))
    first, end = parts[0], 0
    for part in parts:
        if part.start != end or part.full_shape != first.full_shape or part.tensor.dtype != first.tensor.dtype:
            raise CheckpointError(
                f"the parts of tensor {name!r} do not fit together: expected row {end}, found {part.start}"
            )
        end += len(part.tensor)
    if end != first.full_shape[0]:
        raise CheckpointError(f"of tensor {name!r} only {end} of {first.full_shape[0]} rows were saved")
    joined = torch.empty(first.full_shape, dtype=first.tensor.dtype)
    for part in parts:
        joined[part.start : part.start + len(part.tensor)] = part.tensor
    return joined
