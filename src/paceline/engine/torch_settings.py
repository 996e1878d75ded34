"""What torch is set to in this process: threads, deterministic algorithms, compilation."""

from __future__ import annotations

import os
from typing import Literal

import torch

from paceline.core.process import forget_spinning, keep_freed_memory, num_cores
from paceline.core.world import World

Reproducible = Literal["off", "run", "world"]
"""What gives bit-identical results: nothing; the same command; the same command on any number of processes."""


def configure_torch(world: World, threads: int | None = None, reproducible: Reproducible = "run") -> int:
    """Set torch's threads and deterministic algorithms; returns the number of threads of an operation.

    By default that is the cores of the machine divided by its processes, and 1 with `world`.
    """
    if threads is None:
        threads = 1 if reproducible == "world" else max(1, num_cores() // world.local_size)
    torch.set_num_threads(threads)
    forget_spinning()  # OpenMP has read it at the latest by now
    torch.use_deterministic_algorithms(reproducible != "off")
    # Meant for finding kernels that read what they should write; it costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = reproducible == "off"
    if world.device.type == "cpu":
        keep_freed_memory()
    else:  # it stays set: torch reads it before each product of matrices
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return threads
