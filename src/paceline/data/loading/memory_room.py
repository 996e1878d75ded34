"""Room in memory for all samples of a data set, if there is enough."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from paceline.core.mesh import Mesh
from paceline.data.batch import Sample
from paceline.data.loading.memory_cache import Cached, bytes_of, prepare, reserved_bytes
from paceline.data.loading.preparing import Readable
from paceline.data.skipping import UNREADABLE

SHARE = 0.5
"""How much of the free memory decoded samples may take."""

_SHARED_MEMORY = Path("/dev/shm")
_LOOKED_AT = 64  # samples by which the size of all is estimated
_MARGIN = 1.1
_LIMIT, _USED = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))


def keep_in_memory(dataset: Readable, mesh: Mesh, tell: Callable[[str], None], promised: int = 0) -> Cached:
    """The data set with its decoded samples kept in memory, which the processes of a machine share.

    If they would not fit into `SHARE` of what is free, but for the bytes that are `promised` elsewhere, it is told, and
    samples are decoded every time. All processes call this together.
    """
    path, capacity = _make_room(dataset, tell, promised) if mesh.local_rank == 0 else ("", 0)
    message = torch.tensor([capacity, *os.fsencode(path)], dtype=torch.int64)
    capacity, *name = mesh.gather(message)[mesh.rank - mesh.local_rank].tolist()
    descriptor = os.open(bytes(name), os.O_RDWR | os.O_CLOEXEC) if capacity else None
    mesh.barrier()
    if path:
        Path(path).unlink()
    return Cached(dataset, descriptor, capacity)


def _make_room(dataset: Readable, tell: Callable[[str], None], promised: int) -> tuple[str, int]:
    """An empty file for all samples, and its length; no name and 0 if there is too little memory."""
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    needed, free = estimated_bytes(dataset), free_bytes(folder) - promised
    if needed > SHARE * free:
        told = f"about {_gigabytes(needed)} are needed, and {_gigabytes(SHARE * free)} is half of what is free"
        tell(f"data.cache: samples are not kept in memory: {told}; they are decoded every time")
        return "", 0
    descriptor, path = tempfile.mkstemp(prefix="paceline-", dir=folder)
    try:
        prepare(descriptor, len(dataset), needed)
    except OSError as error:
        Path(path).unlink()
        tell(f"data.cache: samples are not kept in memory: {folder} has no room ({error.strerror})")
        return "", 0
    finally:
        os.close(descriptor)
    return path, needed


def estimated_bytes(dataset: Readable) -> int:
    """About what all samples take when they are decoded, by some that are spread over the data set."""
    size = len(dataset)
    looked_at = np.unique(np.linspace(0, size - 1, min(size, _LOOKED_AT)).astype(int)).tolist()
    found = [each for index in looked_at if (each := _bytes_at(dataset, index)) is not None]
    mean = sum(found) / len(found) if found else 0
    return int(mean * size * _MARGIN) + reserved_bytes(size)


def free_bytes(folder: Path) -> int:
    """What may still be taken: of the machine's memory, of this group of processes, and of the file system."""
    space = os.statvfs(folder)
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        allowed = int(_LIMIT.read_text(encoding="ascii")) - int(_USED.read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is no limit, or none that can be read
        allowed = available
    return min(space.f_bavail * space.f_frsize, available, allowed)


def _bytes_at(dataset: Readable, index: int) -> int | None:
    try:
        sample: Sample = getattr(dataset, "open", dataset.read)(index)
        image = sample["image"]
        if isinstance(image, np.ndarray):
            return bytes_of(sample)
        if hasattr(image, "height"):
            return bytes_of({**sample, "image": None}) + 3 * int(image.height) * int(image.width)
        return bytes_of(dataset.read(index))
    except UNREADABLE:
        return None


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB"
