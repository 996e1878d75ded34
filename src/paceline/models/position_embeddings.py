"""Tables of positions, learned for one image size and resampled for another."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = tuple[int, int]
Shape = tuple[int, ...]

_ABSOLUTE = ("pos_embed", "pos_embedding", "position_embedding", "position_embeddings")
_RELATIVE = "relative_position_bias_table"
_COMPUTED = ("relative_position_index", "relative_coords_table", "attn_mask")
_MOST_TOKENS = 5  # a class token and four registers: no usual model has more before its grid


def resample_positions(table: Tensor, old: Size, new: Size, num_prefix_tokens: int = 0) -> Tensor:
    """A table [1, tokens + H·W, D] for another grid: bicubic, antialiased; the tokens before it stay as they are."""
    tokens, grid = table[:, :num_prefix_tokens], table[:, num_prefix_tokens:]
    image = grid.reshape(1, *old, -1).permute(0, 3, 1, 2)  # [1, D, H, W]
    resampled = _resize(image, new, antialias=True).flatten(2).transpose(1, 2)  # [1, H'·W', D]
    return torch.cat([tokens, resampled], dim=1)


def resample_offsets(table: Tensor, old: int, new: int) -> Tensor:
    """A table [old² + tokens, heads] of biases per relative position for another window: bicubic, the tokens kept."""
    grid, tokens = table[: old * old], table[old * old :]
    image = grid.T.reshape(1, -1, old, old)  # [1, heads, old, old]
    resampled = _resize(image, (new, new), antialias=False).flatten(2)[0].T
    return torch.cat([resampled, tokens], dim=0)


def fit_positions(name: str, table: Tensor, shape: Shape, model: nn.Module) -> tuple[Tensor, str] | None:
    """The table resampled to `shape`, and how; None where it is no table of positions or its grids are unclear."""
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
        resampled = _resize(table.permute(0, 3, 1, 2), new, antialias=True).permute(0, 2, 3, 1)
        return resampled, _described("position embedding", old, new)
    return None


def is_computed(name: str) -> bool:
    """Whether the tensor follows from the model's geometry, so that a model's own is always the right one."""
    return name.rpartition(".")[2] in _COMPUTED


def _fit_sequence(table: Tensor, length: int, grid: Size | None) -> tuple[Tensor, str] | None:
    old_length = table.shape[1]
    counts = range(_MOST_TOKENS + 1) if grid is None else [length - grid[0] * grid[1]]
    for num_tokens in counts:
        side = _side(old_length - num_tokens)
        new_side = _side(length - num_tokens)
        new = grid or (new_side and (new_side, new_side))
        if num_tokens >= 0 and side and new:
            resampled = resample_positions(table, (side, side), new, num_tokens)
            return resampled, _described("position embedding", (side, side), new)
    return None


def _fit_offsets(table: Tensor, length: int) -> tuple[Tensor, str] | None:
    for num_tokens in (0, 3):  # three where a class token takes part: to it, from it, and itself
        old, new = _side(table.shape[0] - num_tokens), _side(length - num_tokens)
        if old and new:
            return resample_offsets(table, old, new), _described("relative positions", (old, old), (new, new))
    return None


def _resize(image: Tensor, size: Size, antialias: bool) -> Tensor:
    resized = F.interpolate(image.float(), size=size, mode="bicubic", antialias=antialias, align_corners=False)
    return resized.to(image.dtype)


def _side(area: int) -> int | None:
    side = math.isqrt(max(area, 0))
    return side if side and side * side == area else None


def _grid_size(model: nn.Module, name: str) -> Size | None:
    """The grid of patches that the table's module declares, else the model."""
    for module in (model.get_submodule(name.rpartition(".")[0]), model):
        grid: Any = getattr(getattr(module, "patch_embed", None), "grid_size", None)
        if isinstance(grid, tuple) and len(grid) == 2:
            return int(grid[0]), int(grid[1])
    return None


def _described(what: str, old: Size, new: Size) -> str:
    return f"{what} {old[0]}×{old[1]} → {new[0]}×{new[1]}"
