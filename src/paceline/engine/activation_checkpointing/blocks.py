"""The blocks of a model: the pieces of a few layers each that it repeats, found from its structure alone.

A *layer* is a module with a weight of its own: a convolution, a linear map. Containers, and modules that hold several
pieces of two or more layers, are looked into; what is not looked into is a block. So are runs of single layers within
a sequence, two layers at a time: VGG keeps all its layers in one sequence. A model that declares `_no_split_modules`,
the names of the classes that belong together, has its say first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.models.patterns import no_match, select

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MAX_PIECES = 3
"""A module that is no container may have as many pieces (attention, MLP) and still be one block."""
_LAYERS_OF_RUN = 2
_MAX_LAYERS_OF_SEQUENCE = 3
"""A sequence of more layers than that is cut into runs."""
_TENSORS_OF_LAYER = 2
"""What is kept for a layer with a norm and an activation: what the norm takes, and what the next layer takes."""


@dataclass(frozen=True)
class Block:
    """A module, or some neighboring children of a plain sequence, that is called as one piece."""

    name: str
    owner: nn.Module
    """The module itself, or the sequence that the children belong to."""
    children: tuple[str, ...] = ()
    """The names of the children, in order; none for the whole module."""

    def modules(self) -> list[nn.Module]:
        """What runs when the block runs, from the first to the last."""
        return [self.owner.get_submodule(child) for child in self.children] or [self.owner]


def find_blocks(model: nn.Module, match: Sequence[str] = ()) -> list[Block]:
    """The blocks of a model in its own order, none within another; with `match`, the modules of those names.

    A pattern that names a list of modules stands for the modules in it.
    """
    found = list(_matched(model, match) if match else _Search(model).within(model, ""))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no blocks that could be found from its structure: nothing in it holds a layer"
            " together with others; name the modules with match, or set checkpointing to none"
        )
    return found


def join_neighbors(model: nn.Module, blocks: Sequence[Block], number: int) -> list[Block]:
    """Neighboring blocks of one sequence joined, up to `number` of them, where each is a child of the sequence."""
    groups: list[list[Block]] = []
    for block in blocks:
        if groups and len(groups[-1]) < number and _are_neighbors(model, groups[-1][-1], block):
            groups[-1].append(block)
        else:
            groups.append([block])
    return [group[0] if len(group) == 1 else _join(model, group) for group in groups]


def _are_neighbors(model: nn.Module, one: Block, other: Block) -> bool:
    (sequence, _, key), (other_sequence, _, other_key) = one.name.rpartition("."), other.name.rpartition(".")
    parent = model.get_submodule(sequence)
    if one.children or other.children or sequence != other_sequence or not _is_plain_sequence(parent):
        return False
    keys = [each for each, _ in parent.named_children()]
    return keys.index(other_key) == keys.index(key) + 1


def _join(model: nn.Module, blocks: Sequence[Block]) -> Block:
    sequence = blocks[0].name.rpartition(".")[0]
    return _run(sequence, model.get_submodule(sequence), tuple(each.name.rpartition(".")[2] for each in blocks))


def best_number(blocks: Sequence[Block]) -> int:
    """The number of neighbors to join that minimizes what is kept between blocks plus what one block holds inside.

    With n blocks that hold r times as much inside as between them, √(n/r) is best: 1 for transformers, which are
    wide inside, 2 for a ResNet-50, whose blocks are narrow inside, 4 for a ResNet-152.
    """
    inside = statistics.median(_TENSORS_OF_LAYER * _width_inside(block) for block in blocks)
    return max(1, math.floor(math.sqrt(len(blocks) / inside)))


def _width_inside(block: Block) -> float:
    """The output channels of all its layers divided by those of the last one."""
    layers = [each for module in block.modules() for each in module.modules() if _is_layer(each)]
    widths = [max(len(weight) for weight in layer.parameters(recurse=False) if weight.ndim > 1) for layer in layers]
    return sum(widths) / widths[-1] if widths else 1.0


def _run(sequence_name: str, sequence: nn.Module, keys: tuple[str, ...]) -> Block:
    """Neighboring children of a sequence as one block; a run of one child is that child."""
    prefix = f"{sequence_name}." if sequence_name else ""
    if len(keys) == 1:
        return Block(f"{prefix}{keys[0]}", sequence.get_submodule(keys[0]))
    return Block(f"{prefix}{keys[0]}-{keys[-1]}", sequence, keys)


def _matched(model: nn.Module, match: Sequence[str]) -> Iterator[Block]:
    names = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for pattern in match:
        selected = select(pattern, names)
        if not selected:
            raise no_match("match", pattern, names)
        chosen.update(selected)
    taken: list[str] = []
    for name in names:
        module = model.get_submodule(name)
        is_inside = any(name.startswith(f"{outer}.") for outer in taken)
        if name in chosen and not is_inside and _is_callable(module):
            taken.append(name)
            yield Block(name, module)


class _Search:
    """Finds blocks; respects the classes that the model and its parts declare as one piece."""

    def __init__(self, model: nn.Module) -> None:
        declared = (getattr(each, "_no_split_modules", None) or () for each in model.modules())
        self.whole = {name for names in declared for name in names}

    def within(self, module: nn.Module, prefix: str) -> Iterator[Block]:
        """The blocks among the children of a module."""
        if _is_plain_sequence(module):
            yield from self.in_sequence(module, prefix)
            return
        for key, child in module.named_children():
            yield from self.of_child(prefix + key, child)

    def of_child(self, name: str, child: nn.Module) -> Iterator[Block]:
        """The child as a block, or the blocks in it."""
        if _is_leaf(child):
            return
        is_long = _is_plain_sequence(child) and _num_layers(child) > _MAX_LAYERS_OF_SEQUENCE
        if not self.is_whole(child) and (is_long or not _is_callable(child) or _has_pieces(child)):
            yield from self.within(child, f"{name}.")
        elif _is_worthwhile([child]):
            yield Block(name, child)

    def in_sequence(self, sequence: nn.Module, prefix: str) -> Iterator[Block]:
        """Each larger child as a block, the smaller ones between them as runs."""
        run: list[tuple[str, nn.Module]] = []
        for key, child in sequence.named_children():
            is_large = _num_layers(child) >= _LAYERS_OF_RUN or self.is_whole(child)
            is_full = sum(_num_layers(each) for _, each in run) + _num_layers(child) > _LAYERS_OF_RUN
            if is_large or is_full:
                yield from _as_block(sequence, prefix, run)
                run = []
            if is_large:
                yield from self.of_child(prefix + key, child)
            else:
                run.append((key, child))
        yield from _as_block(sequence, prefix, run)

    def is_whole(self, module: nn.Module) -> bool:
        """Whether the model declares that the module must not be split."""
        return type(module).__name__ in self.whole


def _as_block(sequence: nn.Module, prefix: str, run: list[tuple[str, nn.Module]]) -> Iterator[Block]:
    if _is_worthwhile([child for _, child in run]):
        yield _run(prefix.removesuffix("."), sequence, tuple(key for key, _ in run))


def _has_pieces(module: nn.Module) -> bool:
    """Whether it or something in it holds pieces of two or more layers: several in a container, or many."""
    for each in module.modules():
        pieces = sum(_num_layers(child) >= 2 for child in each.children())
        if pieces > (1 if isinstance(each, _CONTAINERS) else _MAX_PIECES):
            return True
    return False


def _is_worthwhile(modules: Sequence[nn.Module]) -> bool:
    """Whether a layer comes with something else that keeps a tensor for the backward pass."""
    leaves = [leaf for module in modules for leaf in module.modules() if _is_leaf(leaf)]
    working = [leaf for leaf in leaves if not isinstance(leaf, nn.Identity | nn.Flatten)]
    return len(working) > 1 and any(map(_num_layers, modules))


def _num_layers(module: nn.Module) -> int:
    return sum(map(_is_layer, module.modules()))


def _is_layer(module: nn.Module) -> bool:
    return any(weight.ndim > 1 for weight in module.parameters(recurse=False))


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True  # its class cannot be changed
    return all(key == "parametrizations" for key, _ in module.named_children())


def _is_plain_sequence(module: nn.Module) -> bool:
    return _own_forward(module) is nn.Sequential.forward


def _is_callable(module: nn.Module) -> bool:
    return _own_forward(module) is not nn.Module.forward


def _own_forward(module: nn.Module) -> Any:
    """The forward of the original class: a model has the same blocks whether or not they are checkpointed."""
    written = (vars(each) for each in type(module).__mro__ if not vars(each).get("is_checkpointed"))
    return next(each["forward"] for each in written if "forward" in each)
