"""Weights fitted to a model's shapes: position embeddings to its image size, first convolutions to its channels."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.text import pluralize

Size = tuple[int, int]
Shape = tuple[int, ...]

_ABSOLUTE = ("pos_embed", "pos_embedding", "position_embedding", "position_embeddings")
_RELATIVE = "relative_position_bias_table"
_COMPUTED = ("relative_position_index", "relative_coords_table", "attn_mask")
_MAX_PREFIX_TOKENS = 5  # a class token and four registers


def resize_position_embedding(table: Tensor, old: Size, new: Size, num_prefix_tokens: int = 0) -> Tensor:
    """A position embedding [1, tokens + H·W, D] for another grid: bicubic, antialiased; prefix tokens are kept."""
    tokens, grid = table[:, :num_prefix_tokens], table[:, num_prefix_tokens:]
    image = grid.reshape(1, *old, -1).permute(0, 3, 1, 2)  # [1, D, H, W]
    resized = _resize(image, new, antialias=True).flatten(2).transpose(1, 2)  # [1, H'·W', D]
    return torch.cat([tokens, resized], dim=1)


def resize_relative_bias(table: Tensor, old: int, new: int) -> Tensor:
    """A relative position bias [old² + tokens, heads] for another window: bicubic; the tokens are kept."""
    grid, tokens = table[: old * old], table[old * old :]
    image = grid.T.reshape(1, -1, old, old)  # [1, heads, old, old]
    resized = _resize(image, (new, new), antialias=False).flatten(2)[0].T
    return torch.cat([resized, tokens], dim=0)


def fit_position_embedding(name: str, table: Tensor, shape: Shape, model: nn.Module) -> tuple[Tensor, str] | None:
    """The embedding resized to `shape`, and how; None if it is no position embedding or its grid is unknown."""
    last = name.rpartition(".")[2]
    if table.ndim != len(shape):
        return None
    if last == _RELATIVE and table.ndim == 2 and table.shape[1] == shape[1]:
        return _fit_offsets(table, shape[0])
    if not last.endswith(_ABSOLUTE):
        return None
    if table.ndim == 3 and table.shape[0] == shape[0] == 1 and table.shape[2] == shape[2]:
        return _fit_sequence(table, shape[1], _grid_size(model, name))
    if table.ndim == 4 and table.shape[0] == shape[0] and table.shape[3] == shape[3]:
        old, new = (table.shape[1], table.shape[2]), (shape[1], shape[2])  # [1, H, W, D]
        resized = _resize(table.permute(0, 3, 1, 2), new, antialias=True).permute(0, 2, 3, 1)
        return resized, _describe("position embedding", old, new)
    return None


def is_computed(name: str) -> bool:
    """Whether the tensor follows from the model's geometry, so that the model's own is always right."""
    return name.rpartition(".")[2] in _COMPUTED


def _fit_sequence(table: Tensor, length: int, grid: Size | None) -> tuple[Tensor, str] | None:
    old_length = table.shape[1]
    counts = range(_MAX_PREFIX_TOKENS + 1) if grid is None else [length - grid[0] * grid[1]]
    for num_tokens in counts:
        side = _side(old_length - num_tokens)
        new_side = _side(length - num_tokens)
        new = grid or (new_side and (new_side, new_side))
        if num_tokens >= 0 and side and new:
            resized = resize_position_embedding(table, (side, side), new, num_tokens)
            return resized, _describe("position embedding", (side, side), new)
    return None


def _fit_offsets(table: Tensor, length: int) -> tuple[Tensor, str] | None:
    for num_tokens in (0, 3):  # with a class token: to it, from it, and itself
        old, new = _side(table.shape[0] - num_tokens), _side(length - num_tokens)
        if old and new:
            return resize_relative_bias(table, old, new), _describe("relative positions", (old, old), (new, new))
    return None


def _resize(image: Tensor, size: Size, antialias: bool) -> Tensor:
    return F.interpolate(image.float(), size=size, mode="bicubic", antialias=antialias, align_corners=False).to(image)


def _side(area: int) -> int | None:
    side = math.isqrt(max(area, 0))
    return side if side and side * side == area else None


def _grid_size(model: nn.Module, name: str) -> Size | None:
    """The patch grid that the embedding's module declares, or the model."""
    for module in (model.get_submodule(name.rpartition(".")[0]), model):
        grid: Any = getattr(getattr(module, "patch_embed", None), "grid_size", None)
        if isinstance(grid, tuple) and len(grid) == 2:
            return int(grid[0]), int(grid[1])
    return None


def _describe(what: str, old: Size, new: Size) -> str:
    return f"{what} {old[0]}×{old[1]} → {new[0]}×{new[1]}"


def find_first_convs(model: nn.Module) -> list[str]:
    """The names of the modules that take the image: timm's `first_conv`, or the first convolution."""
    config: Any = getattr(model, "default_cfg", None) or {}
    declared = config.get("first_conv") or ()
    modules = dict(model.named_modules())
    names = [name for name in ([declared] if isinstance(declared, str) else declared) if name in modules]
    if names:
        return names
    return next(([name] for name, each in modules.items() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)), [])


def fit_channels(kernel: Tensor, num_channels: int) -> tuple[Tensor, str] | None:
    """A kernel [out, in, …] for images of `num_channels`, and how; None where there is no rule.

    For images whose channels are equal, such as gray ones in RGB, its outputs stay the same.
    """
    found = kernel.shape[1]
    if num_channels == 1:
        summed = kernel.float().sum(dim=1, keepdim=True).to(kernel.dtype)
        return summed, f"summed over its {pluralize(found, 'channel')}"
    if num_channels % found == 0:
        times = num_channels // found
        repeats = [1, times] + [1] * (kernel.ndim - 2)
        return kernel.repeat(*repeats) / times, f"repeated for {num_channels} channels and divided by {times}"
    return None
