"""Sharded tensors: which rank writes which rows, and how shards are merged again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from paceline.core.errors import CheckpointError

Offsets = Mapping[str, tuple[tuple[int, ...], int]]
"""The full shape and the first row of each shard, by tensor name."""
_Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
_NAMES = re.compile(r"(?:model|state)-(\d{5})-of-(\d{5})\.safetensors|part-(\d{5})-of-(\d{5})\.json")


@dataclass(frozen=True)
class TensorShard:
    """Rows of a tensor of `full_shape`, from row `start` on."""

    tensor: Tensor
    full_shape: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if not self.full_shape or shape[1:] != tuple(self.full_shape[1:]) or len(shape) != len(self.full_shape):
            raise ValueError(f"a shard of shape {shape} does not match a tensor of shape {tuple(self.full_shape)}")
        if self.start < 0 or self.start + shape[0] > self.full_shape[0]:
            raise ValueError(f"rows {self.start} to {self.start + shape[0]} are outside of shape {self.full_shape}")

    def detach(self) -> TensorShard:
        """The same shard without gradient history."""
        return replace(self, tensor=self.tensor.detach())


@dataclass(frozen=True)
class SaveRank:
    """This process among those that write one checkpoint together.

    `attempt` is equal on all of them and new for every save, so that files of an interrupted save are recognized.
    """

    rank: int = 0
    world_size: int = 1
    attempt: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {self.world_size} processes")

    @property
    def names(self) -> tuple[str, str, str]:
        """Its file names: the model's, the state's, and the description of both."""
        return shard_names(self.rank, self.world_size)


def shard_names(rank: int, world_size: int) -> tuple[str, str, str]:
    """The file names of one of several ranks."""
    of = f"{rank + 1:05d}-of-{world_size:05d}"
    return f"model-{of}.safetensors", f"state-{of}.safetensors", f"part-{of}.json"


def is_shard_name(name: str) -> bool:
    """Whether one of several ranks writes a file of this name."""
    return _NAMES.fullmatch(name) is not None


def world_size_of(names: Iterable[str]) -> int:
    """How many ranks wrote files of these names together; 1 without shards."""
    found = {match[2] or match[4] for name in names if (match := _NAMES.fullmatch(name))}
    return int(found.pop()) if len(found) == 1 else 1


def select_local(
    leaves: Mapping[str, Tensor | TensorShard], rank: SaveRank
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """The tensors that this rank writes, and of each shard the full shape and first row.

    Rank 0 writes the tensors that are not sharded.
    """
    tensors: dict[str, Tensor] = {}
    offsets: dict[str, list[Any]] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, TensorShard):
            if rank.world_size == 1 and leaf.tensor.shape != leaf.full_shape:
                raise ValueError(f"{name}: is a shard, but only one process saves it")
            tensors[name] = leaf.tensor
            offsets[name] = [list(leaf.full_shape), leaf.start]
        elif rank.rank == 0:
            tensors[name] = leaf
    return tensors, offsets


class _Places(BaseModel):
    model: dict[str, tuple[tuple[_Count, ...], _Count]]
    state: dict[str, tuple[tuple[_Count, ...], _Count]]


def read_offsets(file: str, value: Any) -> dict[str, Offsets]:
    """The checked offsets of a rank's shards, of "model" and "state"."""
    try:
        return dict(_Places.model_validate(value))
    except ValidationError as error:
        raise CheckpointError(f"{file}: places: {first_mistake(error)}") from error


def first_mistake(error: ValidationError) -> str:
    """What is wrong with the content of a file, in one line."""
    first = error.errors(include_url=False)[0]
    where = ascii(".".join(map(str, first["loc"])))[1:-1]
    return f"{where[:100]}: {first['msg'].lower()}, found {repr(first['input'])[:60]}"


def merge_shards(files: Iterable[tuple[Mapping[str, Tensor], Offsets]]) -> dict[str, Tensor]:
    """Full tensors from what `select_local` gave each rank, copied into memory."""
    full: dict[str, Tensor] = {}
    shards: dict[str, list[TensorShard]] = {}
    for tensors, offsets in files:
        if lost := sorted(offsets.keys() - tensors.keys()):
            raise CheckpointError(f"a shard of tensor {lost[0]!r} is missing")
        for name, tensor in tensors.items():
            if name in offsets:
                shards.setdefault(name, []).append(_shard(name, tensor, *offsets[name]))
            elif name in full:
                raise CheckpointError(f"tensor {name!r} was saved twice")
            else:
                full[name] = tensor.clone()
    if both := sorted(full.keys() & shards.keys()):
        raise CheckpointError(f"tensor {both[0]!r} was saved in full and in shards")
    return full | {name: _concatenate(name, found) for name, found in shards.items()}


def _shard(name: str, tensor: Tensor, full_shape: tuple[int, ...], start: int) -> TensorShard:
    try:
        return TensorShard(tensor, full_shape, start)
    except ValueError as error:
        raise CheckpointError(f"tensor {name!r}: {error}") from error


def _concatenate(name: str, shards: list[TensorShard]) -> Tensor:
    shards.sort(key=lambda shard: (shard.start, len(shard.tensor)))
    first, end = shards[0], 0
    for shard in shards:
        if shard.start != end or shard.full_shape != first.full_shape or shard.tensor.dtype != first.tensor.dtype:
            raise CheckpointError(f"the shards of tensor {name!r} do not match: expected row {end}, got {shard.start}")
        end += len(shard.tensor)
    if end != first.full_shape[0]:
        raise CheckpointError(f"only {end} of {first.full_shape[0]} rows of tensor {name!r} were saved")
    return torch.cat([shard.tensor for shard in shards])
