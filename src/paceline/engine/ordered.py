"""The same bits on any number of processes: gradients of micro-batches are added as one fixed tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.core.counting import counted
from paceline.core.mesh import Mesh
from paceline.data.loading.loader import MicroBatch, Update
from paceline.data.sampler import share
from paceline.engine.parallel import SingleProcess, parameter_ids, refuse_changed_parameters
from paceline.engine.running_statistics import RunningStatistics

Node = tuple[int, int]
"""(level, index): the sum of micro-batches [index·2^level, (index + 1)·2^level), as far as there are so many."""


class OrderedTree(SingleProcess):
    """Every process holds the whole model. Where the tree of sums is cut among processes does not change any sum."""

    name = "ordered"

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model)
        self._mesh = mesh
        self._statistics = RunningStatistics(model, mesh)
        self._nodes: dict[Node, Tensor] = {}
        self._known = parameter_ids(model)
        self._dtype = reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})

    @contextmanager
    def accumulate(self, micro: MicroBatch, is_last: bool) -> Iterator[None]:
        """Surrounds the passes of a micro-batch; its gradient becomes a leaf of the tree."""
        with self._statistics.of_one(counts=not micro.is_ghost):
            yield
        refuse_changed_parameters(parameter_ids(self.model), self._known)
        learning = self._learning()
        leaf = torch.cat([_gradient(parameter).reshape(-1).to(self._dtype) for parameter in learning])
        for parameter in learning:
            parameter.grad = None
        grow(self._nodes, (0, micro.index), leaf)

    def exchange(self, update: Update) -> None:
        """Complete the tree: each process does so for a part of the parameters, and all get all parts."""
        size = update.num_microbatches
        total = self._exchange_nodes(size) if self._mesh.world > 1 else root(self._nodes, size)
        self._nodes = {}
        learning = self._learning()
        for parameter, part in zip(learning, torch.split(total, [each.numel() for each in learning]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        self._statistics.fold()

    def describe(self) -> str:
        """One line for the start of a run."""
        processes = counted(self._mesh.world, "process")
        return f"reproducible on any number of processes: {processes} now, gradients added in a fixed order"

    def _learning(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _exchange_nodes(self, size: int) -> Tensor:
        mesh, learning = self._mesh, self._learning()
        length = sum(parameter.numel() for parameter in learning)
        chunk = -(-length // mesh.world)
        owned = [nodes_of(*share(size, rank, mesh.world)) for rank in range(mesh.world)]
        mine = owned[mesh.rank]
        sent = torch.zeros(mesh.world, len(mine), chunk, dtype=self._dtype, device=mesh.device)
        for place, node in enumerate(mine):
            padded = nn.functional.pad(self._nodes[node], (0, chunk * mesh.world - length))
            sent[:, place] = padded.view(mesh.world, chunk)
        counts = [len(nodes) * chunk for nodes in owned]
        received = sent.new_empty(sum(counts))
        dist.all_to_all_single(received, sent.view(-1), counts, [len(mine) * chunk] * mesh.world)
        rows = iter(received.view(-1, chunk))
        part = root({node: next(rows) for nodes in owned for node in nodes}, size)
        total = sent.new_empty(mesh.world, chunk)
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
    """What `grow` leaves of the leaves [start, stop), in their order."""
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
