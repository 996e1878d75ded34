"""CUDA devices of this machine: how many there are, and which process uses which; none is opened."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UsageError
from paceline.core.place import set_variables
from paceline.core.text import pluralize


@dataclass(frozen=True)
class DeviceMapping:
    """A value for CUDA_VISIBLE_DEVICES, and the mapping of processes to devices as text."""

    visible: str
    text: str


ONE_PROCESS = ("single", "dp")
"""Strategies that train in one process, whatever devices there are."""


def map_devices(
    devices: Sequence[int], visible: str | None, num_processes: int, strategy: str = "auto"
) -> DeviceMapping:
    """Devices by their ids among those in CUDA_VISIBLE_DEVICES (None: not set); process k uses the k-th of them.

    With the strategy dp, one process uses all of them.
    """
    if len(set(devices)) < len(devices):
        raise UsageError(f"train.devices: {list(devices)} names a device twice; each process needs its own")
    names = None if visible is None else visible_names(visible)
    beyond = [device for device in devices if device < 0 or (names is not None and device >= len(names))]
    if beyond:
        within = "ids count from 0"
        if names is not None:
            within = f"CUDA_VISIBLE_DEVICES={visible} has {pluralize(len(names), 'device')}"
        raise UsageError(f"train.devices: there is no device {beyond[0]}: {within}")
    if num_processes > len(devices):
        raise UsageError(
            f"train.devices: {num_processes} processes for {pluralize(len(devices), 'device')}; "
            f"name {num_processes} devices or start with --procs {len(devices)}"
        )
    chosen = [str(device) if names is None else names[device] for device in devices]
    if strategy == "dp":
        return DeviceMapping(",".join(chosen), f"one process on devices {', '.join(chosen)}")
    pairs = [f"process {number} on device {name}" for number, name in enumerate(chosen[:num_processes])]
    return DeviceMapping(",".join(chosen), ", ".join(pairs))


def check_exist(devices: Sequence[int] | None) -> None:
    """Raise UsageError for devices that this machine does not have."""
    found = count_devices() if devices else 0
    missing = [device for device in devices or () if device >= found]
    if missing:
        has = f"{pluralize(found, 'CUDA device')}" if found else "no CUDA device that torch can use"
        raise UsageError(
            f"train.devices: there is no device {missing[0]}: this machine has {has}; set train.devices=null, or"
            " train.device=cpu"
        )


def use_devices(devices: Sequence[int] | None, num_processes: int, strategy: str = "auto") -> str | None:
    """Make only these devices visible to this process, before CUDA is loaded; returns the mapping as text."""
    if not devices:
        return None
    mapping = map_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES"), num_processes, strategy)
    set_variables({"CUDA_VISIBLE_DEVICES": mapping.visible})
    return mapping.text


def default_processes(device: str, devices: Sequence[int] | None, strategy: str = "auto") -> int:
    """One process for each CUDA device that training may use, else one."""
    if strategy in ONE_PROCESS or device not in ("auto", "cuda"):
        return 1
    return len(devices) if devices else max(1, count_devices())


def count_devices() -> int:
    """The number of CUDA devices that this process may use, from the driver; no device is opened."""
    installed = _installed_devices() if _torch_has_cuda() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return installed if visible is None else min(installed, len(visible_names(visible)))


def visible_names(visible: str) -> list[str]:
    """The devices of CUDA_VISIBLE_DEVICES; as for CUDA, the list ends at the first that cannot be one."""
    names = []
    for name in (part.strip() for part in visible.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            break
        names.append(name)
    return names


def _installed_devices() -> int:
    """The count of the driver's management library; 0 without it."""
    count = ctypes.c_uint(0)
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
            library.nvmlShutdown()
    return count.value


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, read from its files: importing it takes a second or more."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b.*=\s*None\s*$", text, re.MULTILINE) is None
