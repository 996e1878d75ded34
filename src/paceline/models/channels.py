"""The first convolution, fitted to images of another number or order of channels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from paceline.core.counting import counted

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_first_convolutions(model: nn.Module) -> list[str]:
    """The names of the modules that take the image: as the model says itself, else its first convolution."""
    described: Any = getattr(model, "default_cfg", None) or {}
    declared = described.get("first_conv") or ()
    modules = dict(model.named_modules())
    names = [name for name in ([declared] if isinstance(declared, str) else declared) if name in modules]
    if names:
        return names
    return next(([name] for name, module in modules.items() if isinstance(module, _CONVOLUTIONS)), [])


def fit_channels(kernel: Tensor, num_channels: int) -> tuple[Tensor, str] | None:
    """A kernel [out, in, …] for images of `num_channels`, and how; None where there is no rule.

    Each rule gives, for images whose channels repeat, what the kernel gave before: grey images are such to RGB.
    """
    found = kernel.shape[1]
    if num_channels == 1:
        return kernel.float().sum(dim=1, keepdim=True).to(kernel.dtype), f"summed over its {counted(found, 'channel')}"
    if num_channels % found == 0:
        times = num_channels // found
        repeats = [1, times] + [1] * (kernel.ndim - 2)
        return kernel.repeat(*repeats) / times, f"repeated for {num_channels} channels and divided by {times}"
    return None


def reverse_channels(kernel: Tensor) -> Tensor:
    """A kernel for RGB images from one for BGR images."""
    return kernel.flip(1)
