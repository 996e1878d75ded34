"""A model that nobody can mean is refused while it is built, before it fills memory or takes hours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter

from paceline.core.process import free_memory

MAX_MODULES = 50_000
"""The largest models of timm and torchvision have two thousand."""
_REFUSED = re.compile(r"tried to allocate (\d+) bytes")


@contextmanager
def limited_size(max_bytes: int | None = None) -> Iterator[None]:
    """Have a ValueError raised as soon as what is built inside has more parameters than memory, or too many modules.

    Parameters are counted before they are filled: memory that is only reserved is not taken yet.
    """
    count = _Count(free_memory() if max_bytes is None else max_bytes)
    hooks = [
        register_module_module_registration_hook(count.add_module),
        register_module_parameter_registration_hook(count.add_parameter),
    ]
    try:
        yield
    except RuntimeError as error:
        if refused := _REFUSED.search(str(error)):
            count.refuse(count.num_bytes + int(refused[1]))
        raise
    finally:
        for hook in hooks:
            hook.remove()


class _Count:
    """The modules and the bytes of parameters so far."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_modules = self.num_bytes = 0

    def add_module(self, *_: object) -> None:
        self.num_modules += 1
        if self.num_modules > MAX_MODULES:
            raise ValueError(f"has more than {MAX_MODULES:,} modules; build a smaller model")

    def add_parameter(self, _: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or isinstance(parameter, UninitializedParameter) or parameter.is_meta:
            return
        self.num_bytes += parameter.nbytes
        if self.num_bytes > self.max_bytes:
            self.refuse(self.num_bytes)

    def refuse(self, num_bytes: int) -> None:
        raise ValueError(
            f"needs more than {num_bytes / 1e9:.3g} GB for its parameters, and {self.max_bytes / 1e9:.3g} GB of memory"
            " are free; build a smaller model"
        )
