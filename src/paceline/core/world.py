"""The ranks of a run and their collectives. One process is a world of one, not a special case."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import UsageError
from paceline.core.generators import seed_generators
from paceline.core.place import Place, read_place
from paceline.core.text import pluralize
from paceline.core.torch_private import default_store, num_collectives

_TIMEOUT = timedelta(minutes=10)
_PARTING, _PARTING_SECONDS, _LOOK_SECONDS = "paceline/parting", 30.0, 0.005


@dataclass(frozen=True)
class World:
    """This process's place among `size` processes, and the collectives they share."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int = 1
    """How many of the processes share this machine."""

    @property
    def backend(self) -> str:
        """The backend of torch.distributed; with a device, gloo carries numbers of the host."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def start_sum(self, numbers: list[float]) -> Callable[[], list[float]]:
        """Start an all-reduce of the numbers in float64; calling the result waits and returns the sums."""
        if self.size == 1:
            return lambda: numbers
        tensor = torch.tensor(numbers, dtype=torch.float64)  # on the host: reading it must not wait for a device
        work = dist.all_reduce(tensor, async_op=True)

        def finish() -> list[float]:
            work.wait()
            return tensor.tolist()

        return finish

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the tensor over all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes in rank order; they may differ in length along the first axis."""
        if self.size == 1:
            return [tensor]
        lengths = [int(length) for length in self._gather_equal(torch.tensor([len(tensor)]))]
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = self._gather_equal(padded)
        return [part[:length] for part, length in zip(gathered, lengths, strict=True)]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor of one dimension, on the host; those of other ranks may differ in length."""
        if self.size == 1:
            return tensor
        length = torch.tensor([len(tensor)], device=self.device)
        dist.broadcast(length, 0)
        sent = tensor.to(self.device) if self.is_main else tensor.new_empty(int(length), device=self.device)
        dist.broadcast(sent, 0)
        return sent.cpu()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def seed(self, key: int) -> None:
        """Restart the generators of this process: torch's, NumPy's, Python's and that of its device."""
        seed_generators(key)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(key)  # strategy dp computes on all of them
        elif self.device.type == "mps":
            torch.mps.manual_seed(key)

    def num_collectives(self) -> int:
        """The number of collectives that this rank has started, torch's own included; cheap."""
        if self.size == 1 or not dist.is_initialized():
            return 0
        return num_collectives()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for shared work: ranks leave when all are done, or at once if this one fails."""
        yield
        self.barrier()
        self._see_all_past_the_barrier()
        self.leave()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _see_all_past_the_barrier(self) -> None:
        """Wait, not by gloo: who closes its connections while another is still in a barrier can make that one fail."""
        if self.size == 1 or (store := default_store()) is None:
            return
        deadline = time.monotonic() + _PARTING_SECONDS
        with suppress(RuntimeError):  # the process that keeps the store has seen all, and is gone
            store.add(_PARTING, 1)
            while store.add(_PARTING, 0) < self.size and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        local = tensor.to(self.device).contiguous()
        parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(parts, local)
        return [part.to(tensor.device) for part in parts]


def join(device: str = "auto", key: str = "train.device") -> World:
    """Join the processes that a launcher started, or be a world of one; messages name the `key` of the device."""
    place = read_place(os.environ) or Place()
    chosen = choose_device(device, place.local_rank, key)
    if chosen.type == "mps" and place.world > 1:
        raise UsageError(f"{key}: mps is one device, but {place.world} processes were started; use --procs 1")
    world = World(place.rank, place.world, place.local_rank, chosen, place.local_world)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size > 1 and not dist.is_initialized():
        store = open_store(place, _TIMEOUT)
        dist.init_process_group(world.backend, timeout=_TIMEOUT, store=store, rank=world.rank, world_size=world.size)
    return world


def is_communication_error(error: BaseException) -> bool:
    """Whether another rank or the network failed: never a mistake of the user, and a restart fixes it.

    gloo's errors have no type of their own, but each names the line of its source that raised it.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def choose_device(name: str, local_rank: int, key: str = "train.device") -> torch.device:
    """The device that a recipe's `auto`, `cpu`, `cuda`, `cuda:1` or `mps` means on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        index: int | None = device.index
        found = torch.cuda.device_count()
        own = 0 if found == 1 else local_rank  # a launcher may show each process its own device only
        device = torch.device("cuda", own if index is None else index)
        if device.index >= found:
            last = f"{pluralize(found, 'CUDA device')}, the last is cuda:{found - 1}"
            there = last if found else "no CUDA device that torch can use"
            raise UsageError(f"{key}: {device} does not exist: this machine has {there}; use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError(f"{key}: mps does not exist on this machine; use auto or cpu")
    return device


def constant(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The values as a tensor on a device. `torch.tensor(values, device=…)` would wait for all that a GPU has to do."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on its device; on the host where the device has no float64 (mps)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def open_store(place: Place, timeout: timedelta) -> TCPStore:
    """The store of a run's processes: the first one serves it, unless torchrun does."""
    try:
        address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"MASTER_ADDR={place.address}: no machine of this name is known ({error})") from error
    if place.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(place.address, place.port, place.world, False, timeout)
    listener = _listen_for_others(place, str(address))
    return TCPStore(place.address, place.port, place.world, True, timeout, master_listen_fd=listener.detach())


def serve_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens at this address, and nowhere else; OSError if it is taken, or not of this machine."""
    descriptor = _listen(host, port).detach()
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def _listen_for_others(place: Place, address: str) -> socket.socket:
    """At the address that all ranks have; everywhere if it is none of this machine's that the others can reach."""
    # Some machines know their own name as that of the loopback only.
    is_own_name = ipaddress.ip_address(address.partition("%")[0]).is_loopback and place.local_world < place.world
    if not is_own_name:
        try:
            return _listen(place.address, place.port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", place.port))


def _listen(host: str, port: int) -> socket.socket:
    """At the first address of that name that is one of this machine's."""
    problem = OSError(errno.EADDRNOTAVAIL, host)
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server((str(address[0]), port), family=family)
        except OSError as error:
            problem = error
    raise problem
