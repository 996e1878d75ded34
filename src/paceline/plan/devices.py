"""What devices have: memory, as their makers state it."""

from __future__ import annotations

import os
import re

import torch

from paceline.core.errors import UsageError
from paceline.core.text import join_first

GIB = 2**30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": GIB, "ti": 2**40}

GPUS = {
    "t4": 16, "v100-16gb": 16, "v100-32gb": 32, "p100": 16, "a10": 24, "a10g": 24, "l4": 24, "l40s": 48, "a30": 24,
    "a40": 48, "a100-40gb": 40, "a100-80gb": 80, "h100": 80, "h200": 141, "b200": 180, "a6000": 48,
    "gtx1080ti": 11, "rtx2080ti": 11, "rtx3060": 12, "rtx3070": 8, "rtx3080": 10, "rtx3090": 24, "rtx4060": 8,
    "rtx4070": 12, "rtx4080": 16, "rtx4090": 24, "rtx5080": 16, "rtx5090": 32,
}  # fmt: skip
"""GiB of common GPUs by name."""
CUDA_CONTEXT = GIB // 2
"""What CUDA itself keeps on a device, about: kernels and the libraries' workspaces."""


def parse_memory(text: str) -> int:
    """The bytes that `24GiB`, `512 MB` or the name of a GPU means."""
    name = re.sub(r"[\s_]", "", text.lower())
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]i?|)b?", name)
    if found:
        return round(float(found[1]) * _UNITS[found[2]])
    plain = name.removeprefix("nvidia").replace("-", "")
    for gpu, gib in GPUS.items():
        if plain in (gpu.replace("-", ""), gpu.partition("-")[0]):
            return gib * GIB - CUDA_CONTEXT
    known = join_first(sorted(GPUS), len(GPUS))
    raise UsageError(f"--memory {text}: expected a size such as 24GiB, or one of {known}")


def memory_at_hand() -> tuple[str, int]:
    """The device that a run would use here, and its bytes; of a GPU, those that are free."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[0]
    return "this machine", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
