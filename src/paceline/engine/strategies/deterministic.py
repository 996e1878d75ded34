"""Bit-identical on any number of processes: gradients of micro-batches are summed in one fixed tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.checkpoint.state import Tree
from paceline.core.text import pluralize
from paceline.core.world import World
from paceline.data.loader import MicroBatch, StepBatch
from paceline.data.sampler import rank_range
from paceline.engine.stateful import Parts, copy_state, load_state, share_state
from paceline.engine.strategies.single import SingleStrategy, broadcast_all, parameter_ids, refuse_changed_parameters
from paceline.models.norm import BATCH_NORMS
from paceline.models.placement import with_strides_of

Node = tuple[int, int]
"""(level, index): the sum of micro-batches [index·2^level, (index + 1)·2^level), as far as there are so many."""


class DeterministicStrategy(SingleStrategy):
    """Every rank holds the whole model. How the tree of sums is divided among ranks does not change any sum."""

    name = "deterministic"

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model)
        self._world = world
        self._statistics = RunningStatistics(model, world)
        self._remembered = FirstState()
        self._nodes: dict[Node, Tensor] = {}
        self._used: set[nn.Parameter] = set()
        """Those that got a gradient in this step, on this rank."""
        self._known = parameter_ids(model)
        self._dtype = reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})

    @contextmanager
    def accumulate(self, micro: MicroBatch, is_last: bool) -> Iterator[None]:
        """A context for the passes of a micro-batch; its gradient becomes a leaf of the tree."""
        counts = not micro.is_padding
        with self._statistics.of_one(counts), self._remembered.of_one(self.parts, counts):
            yield
        refuse_changed_parameters(parameter_ids(self.model), self._known)
        trainable = self._learning()
        if counts:
            self._used.update(parameter for parameter in trainable if parameter.grad is not None)
        leaf = torch.cat([_gradient(parameter).reshape(-1).to(self._dtype) for parameter in trainable])
        for parameter in trainable:
            parameter.grad = None
        grow(self._nodes, (0, micro.index), leaf)

    def after_backward(self, step_batch: StepBatch) -> None:
        """Complete the tree: each rank for a part of the parameters, then all gather all parts."""
        size, trainable = step_batch.num_micro_batches, self._learning()
        # Without any gradient it stays None: at a gradient of 0, weight decay and momentum would move the weights.
        num_users = self._world.start_sum([float(parameter in self._used) for parameter in trainable])
        total = self._sum_over_ranks(size) if self._world.size > 1 else root(self._nodes, size)
        self._nodes, self._used = {}, set()
        parts = torch.split(total, [each.numel() for each in trainable])
        for parameter, part, is_used in zip(trainable, parts, num_users(), strict=True):
            if is_used:
                parameter.grad = with_strides_of(part.view_as(parameter), parameter).to(parameter.dtype)
        self._statistics.fold()
        self._remembered.finish(self.parts, self._world)

    def preview(self) -> AbstractContextManager[None]:
        """A context for a pass before those of a step: each starts from the same state."""
        return self.unchanged()

    def describe(self) -> str:
        processes = pluralize(self._world.size, "process")
        return f"reproducible on any number of processes: {processes} now, gradients added in a fixed order"

    def _learning(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _sum_over_ranks(self, size: int) -> Tensor:
        world, trainable = self._world, self._learning()
        length = sum(parameter.numel() for parameter in trainable)
        chunk = -(-length // world.size)
        owned = [nodes_of(*rank_range(size, rank, world.size)) for rank in range(world.size)]
        mine = owned[world.rank]
        sent = torch.zeros(world.size, len(mine), chunk, dtype=self._dtype, device=world.device)
        for place, node in enumerate(mine):
            padded = nn.functional.pad(self._nodes[node], (0, chunk * world.size - length))
            sent[:, place] = padded.view(world.size, chunk)
        counts = [len(nodes) * chunk for nodes in owned]
        received = sent.new_empty(sum(counts))
        dist.all_to_all_single(received, sent.view(-1), counts, [len(mine) * chunk] * world.size)
        rows = iter(received.view(-1, chunk))
        part = root({node: next(rows) for nodes in owned for node in nodes}, size)
        total = sent.new_empty(world.size, chunk)
        dist.all_gather(list(total), part)
        return total.view(-1)[:length]


def grow(nodes: dict[Node, Tensor], node: Node, value: Tensor) -> None:
    """Add a node, and its parent in place of both children as often as its sibling is there."""
    level, index = node
    while index % 2 and (level, index - 1) in nodes:
        value = nodes.pop((level, index - 1)).add_(value)
        level, index = level + 1, index // 2
    nodes[level, index] = value


def nodes_of(start: int, stop: int) -> list[Node]:
    """The nodes that `grow` leaves of the leaves [start, stop), in order."""
    nodes: list[Node] = []
    while start < stop:
        level = 0
        while start % 2 ** (level + 1) == 0 and start + 2 ** (level + 1) <= stop:
            level += 1
        nodes.append((level, start >> level))
        start += 2**level
    return nodes


def root(nodes: dict[Node, Tensor], size: int) -> Tensor:
    """The sum of all `size` leaves."""

    def value(level: int, index: int) -> Tensor:
        if (level, index) in nodes:
            return nodes[level, index]
        left = value(level - 1, 2 * index)
        has_right = (2 * index + 1) << (level - 1) < size
        return left + value(level - 1, 2 * index + 1) if has_right else left

    return value((size - 1).bit_length(), 0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


_STATISTICS = ("running_mean", "running_var")


class RunningStatistics:
    """Each micro-batch starts from the buffers before the step; their updates are then applied in order.

    A layer's statistics r become (1 - m)·r + m·s with every micro-batch, s being its own. Other buffers become what the
    first micro-batch makes of them.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model = model
        self._world = world
        modules = model.named_modules()
        self._norms = {name: module for name, module in modules if isinstance(module, BATCH_NORMS)}
        self._before: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}
        self._seen: list[Tensor] = []

    @contextmanager
    def of_one(self, counts: bool = True) -> Iterator[None]:
        """A context for the passes of one micro-batch of this rank; a padding micro-batch has no effect."""
        if self._before:
            self._put_back(self._before)
        else:
            self._before = self._copies()
        yield
        if counts:
            self._first = self._first or self._copies()
            self._seen.append(_flat(self._statistics()))

    def fold(self) -> None:
        """Give every rank the buffers of the whole step."""
        if self._before or self._world.size > 1:
            self._before = self._before or self._copies()
            self._keep_first()
            statistics = self._statistics()
            own = torch.stack(self._seen) if self._seen else _flat(statistics).new_zeros(0, _size(statistics))
            self._advance(torch.cat(self._world.gather(own)))
        self._before, self._first, self._seen = {}, {}, []

    def _advance(self, rows: Tensor) -> None:
        """Update each layer with the statistics of all micro-batches, one after another."""
        columns = iter(torch.split(rows, [each.numel() for each in self._statistics()], 1))
        for name, norm in self._training():
            tracked = self._before.get(f"{name}.num_batches_tracked")
            shares = _shares(norm.momentum, tracked, len(rows))
            for statistic in _STATISTICS:
                running: Tensor = getattr(norm, statistic)
                before = self._before[f"{name}.{statistic}"]
                running.copy_(before)
                for left_by_one, weight in zip(next(columns), shares, strict=True):
                    if not weight:  # a momentum of 0: no batch counts
                        continue
                    of_batch = (left_by_one.view_as(before) - (1 - shares[0]) * before) / shares[0]
                    running.mul_(1 - weight).add_(of_batch, alpha=weight)
            if tracked is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(tracked + len(rows))

    def _keep_first(self) -> None:
        """Set other buffers to their values after the first micro-batch, which rank 0 has."""
        self._put_back(self._before | self._first)
        if self._world.size > 1:
            own = {f"{name}.{buffer}" for name, norm in self._norms.items() for buffer, _ in norm.named_buffers()}
            broadcast_all(buffer for name, buffer in self._model.named_buffers() if name not in own)

    def _training(self) -> list[tuple[str, Any]]:
        return [(name, norm) for name, norm in self._norms.items() if norm.training and norm.running_mean is not None]

    def _statistics(self) -> list[Tensor]:
        return [getattr(norm, statistic) for _, norm in self._training() for statistic in _STATISTICS]

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _put_back(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self._model.named_buffers():
            buffer.copy_(values[name])


class FirstState:
    """Each micro-batch starts from the state before the step; the state after the first one is kept.

    So it does not matter which process computes which micro-batch.
    """

    def __init__(self) -> None:
        self._before: Tree = None
        self._first: Tree = None

    @contextmanager
    def of_one(self, parts: Parts, counts: bool) -> Iterator[None]:
        """A context for the passes of one micro-batch of this rank."""
        if self._before is None:
            self._before = copy_state(parts)
        else:
            load_state(parts, self._before)
        yield
        if counts and self._first is None:
            self._first = copy_state(parts)

    def finish(self, parts: Parts, world: World) -> None:
        """Call after the last micro-batch, on all ranks."""
        load_state(parts, self._first or self._before or {})
        share_state(parts, world)
        self._before = self._first = None


def _shares(momentum: float | None, tracked: Tensor | None, steps: int) -> list[float]:
    """The weight of each micro-batch; without a momentum all batches weigh the same, those `tracked` before too."""
    if momentum is not None:
        return [float(momentum)] * steps
    assert tracked is not None
    return [1.0 / (int(tracked) + step + 1) for step in range(steps)]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
