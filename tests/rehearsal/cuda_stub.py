"""Compiles a CUDA device without kernels, and loads it before torch, which looks for it once."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")


def compiler() -> str | None:
    """The C++ compiler of this machine, if there is one."""
    return shutil.which("g++")


def compile_stub(folder: Path) -> Path:
    """The shared library, built in `folder` unless it is there."""
    built = folder / "libcuda_stub.so"
    if not built.exists():
        root = _torch()
        command = [compiler() or "g++", "-std=c++20", "-shared", "-fPIC", "-O0", str(SOURCE), "-o", str(built)]
        command += [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return built


def load_stub(library: Path) -> None:
    """Register the device; only before the first `import torch` of a process."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
