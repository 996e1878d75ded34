"""BatchNorm's running statistics over an update whose micro-batches are computed in several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.mesh import Mesh

_STATISTICS = ("running_mean", "running_var")


class RunningStatistics:
    """Each micro-batch starts from the buffers that the update began with; what each did is then done in their order.

    A layer's statistics r become (1 - m)·r + m·s with every micro-batch, s being its own. Other buffers become what the
    first micro-batch makes of them.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model = model
        self._mesh = mesh
        modules = model.named_modules()
        self._norms = {name: module for name, module in modules if isinstance(module, _BatchNorm)}
        self._before: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}
        self._seen: list[Tensor] = []

    @contextmanager
    def of_one(self, counts: bool = True) -> Iterator[None]:
        """Surrounds the passes of one micro-batch of this process; a ghost leaves nothing behind."""
        if self._before:
            self._put_back(self._before)
        else:
            self._before = self._copies()
        yield
        if counts:
            self._first = self._first or self._copies()
            self._seen.append(_flat(self._statistics()))

    def fold(self) -> None:
        """Have every process hold the buffers of the whole update."""
        if self._before or self._mesh.world > 1:
            self._before = self._before or self._copies()
            self._keep_first()
            statistics = self._statistics()
            own = torch.stack(self._seen) if self._seen else _flat(statistics).new_zeros(0, _size(statistics))
            self._advance(torch.cat(self._mesh.gather(own)))
        self._before, self._first, self._seen = {}, {}, []

    def _advance(self, rows: Tensor) -> None:
        """Have each layer take in the statistics of all micro-batches, one after another."""
        columns = iter(torch.split(rows, [each.numel() for each in self._statistics()], 1))
        for name, norm in self._training():
            shares = _shares(norm, len(rows))
            for statistic in _STATISTICS:
                running: Tensor = getattr(norm, statistic)
                before = self._before[f"{name}.{statistic}"]
                running.copy_(before)
                for left_by_one, share in zip(next(columns), shares, strict=True):
                    of_batch = (left_by_one.view_as(before) - (1 - shares[0]) * before) / shares[0]
                    running.mul_(1 - share).add_(of_batch, alpha=share)
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(self._before[f"{name}.num_batches_tracked"] + len(rows))

    def _keep_first(self) -> None:
        """Buffers of other kinds: as the first micro-batch, which the first process has, leaves them."""
        self._put_back(self._before | self._first)
        if self._mesh.world > 1:
            own = {f"{name}.{buffer}" for name, norm in self._norms.items() for buffer, _ in norm.named_buffers()}
            for name, buffer in self._model.named_buffers():
                if name not in own:
                    dist.broadcast(buffer, 0)

    def _training(self) -> list[tuple[str, _BatchNorm]]:
        return [(name, norm) for name, norm in self._norms.items() if norm.training and norm.running_mean is not None]

    def _statistics(self) -> list[Tensor]:
        return [getattr(norm, statistic) for _, norm in self._training() for statistic in _STATISTICS]

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _put_back(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self._model.named_buffers():
            buffer.copy_(values[name])


def _shares(norm: _BatchNorm, steps: int) -> list[float]:
    """What each micro-batch counts for; without a momentum all batches ever seen count alike."""
    if norm.momentum is not None:
        return [float(norm.momentum)] * steps
    assert norm.num_batches_tracked is not None
    return [1.0 / (int(norm.num_batches_tracked) + step + 1) for step in range(steps)]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
