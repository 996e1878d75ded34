"""The processes of a run and what they say to each other. One process is a world of one, not a special case."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from paceline.core.errors import UsageError

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Mesh:
    """This process's place among `world` processes, and the collectives they share."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Each number added over all processes, in float64."""
        if self.world == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor added over all processes."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes in rank order; they may differ in length along the first axis."""
        if self.world == 1:
            return [tensor]
        lengths = [int(length) for length in self._gather_equal(torch.tensor([len(tensor)]))]
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = self._gather_equal(padded)
        return [part[:length] for part, length in zip(gathered, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait until every process has come here."""
        if self.world > 1:
            dist.barrier()

    def seed(self, key: int) -> None:
        """Restart the generators of this process, that of its device included."""
        torch.default_generator.manual_seed(key)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(key)

    def leave(self) -> None:
        """Part from the other processes."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        local = tensor.to(self.device).contiguous()
        parts = [torch.empty_like(local) for _ in range(self.world)]
        dist.all_gather(parts, local)
        return [part.to(tensor.device) for part in parts]


def join(device: str = "auto") -> Mesh:
    """Take this process's place among those that a launcher started, or be a world of one."""
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    mesh = Mesh(rank, world, local_rank, choose_device(device, local_rank))
    if mesh.device.type == "cuda":
        torch.cuda.set_device(mesh.device)
    if world > 1 and not dist.is_initialized():
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
    return mesh


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device that a recipe's `auto`, `cpu`, `cuda`, `cuda:1` or `mps` means on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        index: int | None = device.index
        device = torch.device("cuda", local_rank if index is None else index)
        found = torch.cuda.device_count()
        if device.index >= found:
            raise UsageError(f"{device} does not exist: this machine has {found} CUDA devices; use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("mps does not exist on this machine; use auto or cpu")
    return device
