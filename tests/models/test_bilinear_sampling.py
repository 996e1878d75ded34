"""Bilinear sampling with a deterministic backward pass: torch's own values and gradients."""

import torch
import torch.nn.functional as F

from paceline.models.bilinear_sampling import grid_sample, sample_bilinear


def inputs(dtype: torch.dtype, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, and points of which many are outside of them or share their pixels."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, channels, 5, 7, generator=generator, dtype=dtype)
    grid = torch.randn(2, 6, 4, 2, generator=generator, dtype=dtype) * 0.9
    grid[0, 0] = grid[0, 1]
    grid[1, 0, 0] = torch.tensor([-1.0, 1.0])
    return features.requires_grad_(), grid.requires_grad_()


def test_values_and_gradients_are_those_of_torch() -> None:
    features, grid = inputs(torch.float32, 8)
    weights = torch.randn(2, 8, 6, 4, generator=torch.Generator().manual_seed(1))
    expected = F.grid_sample(features, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    found = sample_bilinear(features, grid)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    wanted = torch.autograd.grad((expected * weights).sum(), (features, grid))
    got = torch.autograd.grad((found * weights).sum(), (features, grid))
    for pair in zip(got, wanted, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)  # points where two pixels meet have no derivative
    features = torch.randn(2, 2, 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    grid = (torch.rand(2, 3, 2, 2, generator=generator, dtype=torch.float64) * 3 - 1.5).requires_grad_()
    assert torch.autograd.gradcheck(sample_bilinear, (features, grid))


def test_on_a_cpu_torch_samples() -> None:
    features, grid = inputs(torch.float32)
    sampled = grid_sample(features, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    assert sampled.grad_fn is not None
    assert "GridSampler" in type(sampled.grad_fn).__name__
