"""What devices have, as their makers state it: memory, its bandwidth, and operations a second by precision."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.core.errors import UsageError
from paceline.core.process import free_memory
from paceline.core.text import join_first

GIB = 2**30
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": GIB, "ti": 2**40}
_FEWEST_BYTES = 2**20  # that a number without a unit may mean: fewer are GiB, or MiB, of which the unit was forgotten

# GiB, GB/s, and dense TFLOP/s in fp32, tf32 and fp16 (with fp32 accumulation); before Ampere, 0 in tf32: there is no
# bf16 either, and both are computed as fp32. Last, the GB/s in each direction between the GPUs of a machine: NVLink
# where all of them have it, else PCIe.
_GPUS: dict[str, tuple[float, float, float, float, float, float]] = {
    "p100": (16, 732, 10.6, 0, 21.2, 80),
    "gtx1080ti": (11, 484, 11.3, 0, 11.3, 16),
    "v100-16gb": (16, 900, 15.7, 0, 125, 150),
    "v100-32gb": (32, 900, 15.7, 0, 125, 150),
    "t4": (16, 320, 8.1, 0, 65, 16),
    "rtx2080ti": (11, 616, 13.4, 0, 53.8, 16),
    "a10": (24, 600, 31.2, 62.5, 125, 32),
    "a10g": (24, 600, 35, 35, 70, 32),
    "a30": (24, 933, 10.3, 82, 165, 32),
    "a40": (48, 696, 37.4, 74.8, 149.7, 32),
    "a6000": (48, 768, 38.7, 77.4, 154.8, 32),
    "a100-40gb": (40, 1555, 19.5, 156, 312, 300),
    "a100-80gb": (80, 2039, 19.5, 156, 312, 300),
    "rtx3060": (12, 360, 12.7, 12.7, 25.5, 32),
    "rtx3070": (8, 448, 20.3, 20.3, 40.6, 32),
    "rtx3080": (10, 760, 29.8, 29.8, 59.5, 32),
    "rtx3090": (24, 936, 35.6, 35.6, 71, 32),
    "l4": (24, 300, 30.3, 60, 121, 32),
    "l40s": (48, 864, 91.6, 183, 362, 32),
    "rtx4060": (8, 272, 15.1, 15.1, 30.2, 16),
    "rtx4070": (12, 504, 29.1, 29.1, 58.3, 32),
    "rtx4080": (16, 717, 48.7, 48.7, 97.5, 32),
    "rtx4090": (24, 1008, 82.6, 82.6, 165.2, 32),
    "h100": (80, 3350, 67, 495, 989, 450),
    "h200": (141, 4800, 67, 495, 989, 450),
    "b200": (180, 7700, 75, 1100, 2250, 900),
    "rtx5080": (16, 960, 56.3, 56.3, 112.6, 64),
    "rtx5090": (32, 1792, 104.8, 104.8, 209.5, 64),
}
CUDA_CONTEXT = GIB // 2
"""What CUDA itself keeps on a device, about: kernels and the libraries' workspaces."""


@dataclass(frozen=True)
class Speed:
    """How fast a device can be at most: bytes and, by precision, floating-point operations in a second."""

    bandwidth: float
    flops: dict[str, float]
    source: str
    """Where the numbers are from, for readers."""
    link: float | None = None
    """Bytes a second, in each direction, between the devices of a machine; None if nothing is known of it."""


@dataclass(frozen=True)
class Device:
    """A device to plan for."""

    name: str
    memory: int
    """Bytes that a run may use."""
    speed: Speed | None = None
    """None if only the memory is known."""
    is_cpu: bool = False
    """Whether it is this machine's CPU, whose memory all processes share; one of which only the memory is known counts
    as a GPU."""


def parse_device(text: str, option: str = "--memory") -> Device:
    """The device that the name of a GPU means, or one of which no more is known than its memory, as in `24GiB`.

    `option` is what errors name.
    """
    name = re.sub(r"[\s_]", "", text.lower())
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(([kmgt]i?|)b?)", name)
    if found:
        memory = round(float(found[1]) * _UNITS[found[3]])
        if memory < (1 if found[2] else _FEWEST_BYTES):
            unit = "expected more than none" if found[2] else f"these are bytes; give a unit, as in {found[1]}GiB"
            raise UsageError(f"{option} {text}: {unit}")
        return Device(text, memory)
    gpu = _find_gpu(name)
    if gpu is None:
        known = join_first(sorted(_GPUS), len(_GPUS))
        raise UsageError(f"{option} {text}: expected a size such as 24GiB, or one of {known}")
    return Device(gpu, round(_GPUS[gpu][0] * GIB) - CUDA_CONTEXT, _speed(gpu))


def device_at_hand(processes: int = 1) -> Device:
    """The device that some processes would use here, with the memory that is free; of several GPUs, the least."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        gpu = _find_gpu(re.sub(r"[\s_]", "", name.lower()))
        used = range(min(processes, torch.cuda.device_count()))
        memory = min(torch.cuda.mem_get_info(index)[0] for index in used)
        return Device(name, memory, _speed(gpu) if gpu else None)
    return Device("this machine", free_memory(), _measure_cpu(), is_cpu=True)


def _find_gpu(name: str) -> str | None:
    """The GPU that a user or its driver calls so, as in `a100-80gb`, `NVIDIA A100-SXM4-80GB` or `Tesla T4`."""
    plain = re.sub(r"nvidia|geforce|tesla|rtx(?=a)|sxm\d?|pcie|hbm\w*|-", "", name)
    for gpu, (memory, *_) in _GPUS.items():
        model = gpu.partition("-")[0]
        if plain in (gpu.replace("-", ""), model, f"{model}{memory}gb"):
            return gpu
    return None


def _speed(gpu: str) -> Speed:
    _, bandwidth, fp32, tf32, fp16, link = _GPUS[gpu]
    tera = {"fp32": fp32, "tf32": tf32 or fp32, "fp16": fp16, "bf16": fp16 if tf32 else fp32}
    flops = {precision: number * 1e12 for precision, number in tera.items()}
    return Speed(bandwidth * 1e9, flops, "as its maker states it", link * 1e9)


def _measure_cpu() -> Speed:
    """What a matrix product and a copy reach; many processors have no units for half precision, and are far slower."""
    flops = {}
    for precision, dtype, side in (
        ("fp32", torch.float32, 512),
        ("bf16", torch.bfloat16, 256),
        ("fp16", torch.float16, 256),
    ):
        matrix = torch.ones(side, side, dtype=dtype)
        flops[precision] = 2 * side**3 / _fastest(lambda matrix=matrix: torch.mm(matrix, matrix))  # type: ignore[misc]
    taken, given = torch.ones(2**23), torch.ones(2**23)  # memory that is in use already
    bandwidth = 2 * taken.nbytes / _fastest(lambda: given.copy_(taken))
    return Speed(bandwidth, {**flops, "tf32": flops["fp32"]}, "measured now")


def _fastest(work: Callable[[], object], budget: float = 0.2) -> float:
    """The seconds of the fastest try: others are slower where programs share the cores."""
    seconds, start = list[float](), time.perf_counter()
    while not seconds or time.perf_counter() - start < budget:
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
