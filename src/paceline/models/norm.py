"""Norm layers: which modules are one, and BatchNorm synchronized over all processes."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.nn.functional import all_reduce

BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)
INSTANCE_NORMS = (
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d),
)
STATISTICS_NORMS = (*BATCH_NORMS, *INSTANCE_NORMS)
"""Norm layers that may track statistics in buffers."""
NORM_TYPES = (*STATISTICS_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""torch's norm layers; subclasses are norm layers whatever their name."""

# Others: RmsNorm2d, FrozenBatchNorm2d, LayerNormAct, EvoNorm2dS0, SimpleNormFp32 …
_NORM_NAME = re.compile(r"Norm(?:\d+d?|Act|Tlu|Fp32|[BS]\d[a-z]?)*$", re.IGNORECASE)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm layer, by its type, or by the type's name if it has tensors of its own."""
    if isinstance(module, NORM_TYPES):
        return True
    return bool(_NORM_NAME.search(type(module).__name__)) and bool(module._parameters or module._buffers)


def convert_sync_batchnorm(model: nn.Module) -> int:
    """Synchronize the model's BatchNorm layers over all processes, and return their number.

    The layers stay the same objects, with their parameters, buffers and hooks. Call it once the model is on its device.
    Raises ValueError for a layer whose class overrides the forward pass, which would get lost.
    """
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BATCH_NORMS)]
    on_cuda = any(parameter.is_cuda for parameter in model.parameters())
    classes = [_sync_class(name, layer, on_cuda) for name, layer in layers]
    for (_, layer), sync_class in zip(layers, classes, strict=True):
        layer.__class__ = sync_class  # type: ignore[assignment]
    return len(layers)


class SyncBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the samples of all processes, which may differ in number; torch's works on GPUs only.

    In evaluation mode, and on one process, it is plain BatchNorm.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - named as in torch
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - named as in torch
        """The input, normalized per channel, in its own dtype."""
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        values = input if input.dtype == torch.float64 else input.float()
        mean, variance, count = _joint_statistics(values)
        if self.track_running_stats:
            self._update_running(mean, variance * (count / (count - 1)))
        shape = [1, -1] + [1] * (values.dim() - 2)
        centered = values - mean.to(values).view(shape)
        normalized = centered * (variance + self.eps).rsqrt().to(values).view(shape)
        if self.affine:
            normalized = normalized * self.weight.to(values).view(shape) + self.bias.to(values).view(shape)
        return normalized.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        for running, latest in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
            running.mul_(1 - momentum).add_(latest.to(running.dtype), alpha=momentum)


def _joint_statistics(values: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean and variance per channel [C] over all processes, float64, and the number of values; equal on all ranks."""
    dims, size = [0, *range(2, values.dim())], values.numel() // values.shape[1]
    own_mean = values.sum(dims, dtype=torch.float64) / max(size, 1)
    centered = values - own_mean.to(values).view([1, -1] + [1] * (values.dim() - 2))
    own = torch.stack([own_mean, centered.square().sum(dims, dtype=torch.float64), torch.full_like(own_mean, size)])
    # A sum in which each process has its own row gathers all rows, and gradients go back by the same sum.
    rows = own.new_zeros(dist.get_world_size(), *own.shape)
    rows = rows.index_add(0, torch.tensor([dist.get_rank()]), own[None])
    means, squares, counts = all_reduce(rows).unbind(1)  # type: ignore[no-untyped-call]
    total = counts[:, 0].sum().item()
    if total < 2:
        raise ValueError(f"BatchNorm in training needs more than one value per channel, all processes have {total:g}")
    mean = (means * counts).sum(0) / total
    # Deviations from each rank's mean, and of these means from the common one: no cancellation of large numbers.
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, variance, total


class _ActivationMixin:
    """The dropout and activation of timm's BatchNormAct, before a class that normalizes."""

    def forward(self, x: Tensor) -> Tensor:
        normalized = super().forward(x)  # type: ignore[misc]
        activated: Tensor = self.act(self.drop(normalized))  # type: ignore[attr-defined]
        return activated


class _SyncBatchNormAct(_ActivationMixin, SyncBatchNorm):
    pass


class _CudaSyncBatchNorm(nn.SyncBatchNorm):
    """torch's, for layers that were not constructed as such."""

    process_group = None  # all processes


class _CudaSyncBatchNormAct(_ActivationMixin, _CudaSyncBatchNorm):
    pass


def _sync_class(name: str, layer: nn.Module, on_cuda: bool) -> type[nn.Module]:
    """The synchronized class of a BatchNorm layer."""
    kind = type(layer)
    if kind.forward in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward):
        return _CudaSyncBatchNorm if on_cuda else SyncBatchNorm
    is_timm = kind.__module__.startswith("timm.") and hasattr(layer, "act") and hasattr(layer, "drop")
    if is_timm or issubclass(kind, _ActivationMixin):
        return _CudaSyncBatchNormAct if on_cuda else _SyncBatchNormAct
    raise ValueError(
        f"the layer {name!r} is a {kind.__name__}, a BatchNorm with its own forward pass, which cannot be synchronized;"
        " use torch's BatchNorm, or set train.sync_bn: false"
    )
