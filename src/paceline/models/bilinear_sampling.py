"""`grid_sample` with a deterministic backward pass on every device: torch's has none for CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grid_sample(
    features: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Tensor:
    """What torch's function of this name gives; with deterministic algorithms on CUDA, gradients by sorted sums."""
    if features.is_cuda and torch.are_deterministic_algorithms_enabled():
        assert (mode, padding_mode, align_corners) == ("bilinear", "zeros", False)
        return sample_bilinear(features, grid)
    return F.grid_sample(features, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)


def sample_bilinear(features: Tensor, grid: Tensor) -> Tensor:
    """Features [N, C, H, W] at the points of a grid [N, Ho, Wo, 2] (x and y from -1 to 1): [N, C, Ho, Wo]."""
    sampled: Tensor = _BilinearSampling.apply(features, grid)  # type: ignore[no-untyped-call]
    return sampled


class _BilinearSampling(torch.autograd.Function):
    """Only inputs are saved: the backward pass recomputes corners and their weights."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, grid: Tensor) -> Tensor:
        ctx.save_for_backward(features, grid)
        return F.grid_sample(features, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        features, grid = ctx.saved_tensors
        num_images, channels, height, width = features.shape
        pixels = features.permute(0, 2, 3, 1).reshape(-1, channels).to(grad)  # [N·H·W, C]
        grad = grad.permute(0, 2, 3, 1).reshape(-1, channels)  # [N·Ho·Wo, C]
        size = torch.stack([grid.new_full((), width), grid.new_full((), height)]).to(grad)
        points = ((grid.to(grad) + 1) * size - 1).view(-1, 2) / 2  # in pixels, the first of which has its center at 0
        corner = points.floor()
        share = points - corner  # how near the points are to the right and the lower corners
        first = torch.arange(num_images, device=grad.device).repeat_interleave(len(points) // num_images)
        first = first * (height * width)  # the first pixel of each point's image
        grad_pixels, grad_share = torch.zeros_like(pixels), torch.zeros_like(points)
        for right, lower in ((0, 0), (1, 0), (0, 1), (1, 1)):
            x, y = corner[:, 0] + right, corner[:, 1] + lower
            inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
            place = first + (y.clamp(0, height - 1) * width + x.clamp(0, width - 1)).long()
            across = share[:, 0] if right else 1 - share[:, 0]
            down = share[:, 1] if lower else 1 - share[:, 1]
            # Sums of repeated indices: torch sorts them first, so that the order of additions is fixed.
            grad_pixels.index_put_((place,), (across * down * inside)[:, None] * grad, accumulate=True)
            change = (pixels[place] * grad).sum(1) * inside
            grad_share[:, 0] += change * down * (1 if right else -1)
            grad_share[:, 1] += change * across * (1 if lower else -1)
        grad_features = grad_pixels.view(num_images, height, width, channels).permute(0, 3, 1, 2)
        return grad_features.to(features.dtype), (grad_share * size / 2).view_as(grid).to(grid.dtype)
