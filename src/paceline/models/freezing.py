"""Parts of a model that do not learn, for the whole run or for its first steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from paceline.core.text import join_first, pluralize
from paceline.models.module_types import NORM_TYPES
from paceline.models.patterns import is_under, select, unmatched
from paceline.models.surgery import find_heads

ALL_BUT_HEAD = "all_but_head"
_SHOWN = 6


class NoFreezing:
    """Everything learns, all the time."""

    unfreeze_steps: tuple[int, ...] = ()

    def frozen_at(self, step: int) -> list[str]:
        """Names of the parameters that do not learn in this step."""
        return []

    def due(self, step: int) -> list[str]:
        """Names of the parameters that begin to learn with this step."""
        return []

    def apply(self, step: int) -> None:
        """Make the model as it has to be in this step."""

    def train_mode(self, model: nn.Module) -> None:
        """Put the model into training mode, frozen norm layers excepted."""
        model.train()

    def describe(self) -> list[str]:
        """What is frozen, in lines for a reader."""
        return []


class Freezing:
    """Parameters that do not learn, by patterns of their names, and the steps at which some begin to.

    A pattern is a glob that also stands for all that is below a module, a `re:` expression, or `all_but_head`.
    Frozen parameters have no gradient; norm layers among them neither learn nor count: they stay in eval mode.
    Which ones are frozen follows from the step alone.
    """

    def __init__(
        self, model: nn.Module, patterns: Sequence[str], unfreeze: Sequence[tuple[int, Sequence[str]]] = ()
    ) -> None:
        self.model = model
        # A shared parameter has several names: the first one stands for it, any of them selects it.
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        everything = list(model.named_parameters(remove_duplicate=False))
        self._first_name = {name: first[id(parameter)] for name, parameter in everything}
        # What a model itself holds fixed, such as a computed table of positions, is never set free.
        learnable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        chosen = self._select("freeze", patterns)
        self._initial = [name for name in learnable if name in chosen]
        self._fixed = chosen.difference(learnable)
        if learnable and len(self._initial) == len(learnable):
            raise ValueError(f"freeze {', '.join(map(repr, patterns))} leaves nothing to train")
        self._freed_at = self._plan(sorted(unfreeze, key=lambda stage: stage[0]))
        self.unfreeze_steps: tuple[int, ...] = tuple(sorted(set(self._freed_at.values())))
        self._norms = _norm_layers(model)
        self._resting: list[nn.Module] = []
        self.apply(0)

    def frozen_at(self, step: int) -> list[str]:
        """Names of the parameters that do not learn in this step, in the model's order."""
        return [name for name in self._initial if step < self._freed_at.get(name, step + 1)]

    def due(self, step: int) -> list[str]:
        """Names of the parameters that begin to learn with this step, in the model's order."""
        return [name for name in self._initial if self._freed_at.get(name) == step]

    def apply(self, step: int) -> None:
        """Make the model as it has to be in this step: gradients off or on, frozen norm layers at rest."""
        frozen = set(self.frozen_at(step))
        for name in self._initial:
            parameter = self.model.get_parameter(name)
            parameter.requires_grad_(name not in frozen)
            if name in frozen:
                parameter.grad = None
        for module in self._resting:
            module.train(self.model.training)
        held = frozen | self._fixed
        self._resting = [
            module for module, names in self._norms if names and held.issuperset(self._first_name[one] for one in names)
        ]
        for module in self._resting:
            module.eval()

    def train_mode(self, model: nn.Module) -> None:
        """Put the model, which may be wrapped, into training mode, frozen norm layers excepted."""
        model.train()
        for module in self._resting:
            module.eval()

    def describe(self) -> list[str]:
        """What is frozen at the start and what is set free when, in lines for a reader."""
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        count = sum(sizes[name] for name in self._initial)
        lines = [
            f"frozen: {count:,} of {sum(sizes.values()):,} parameters "
            f"({len(self._initial)} of {len(sizes)} tensors): {self._modules(self._initial)}"
        ]
        for step in self.unfreeze_steps:
            names = self.due(step)
            freed = sum(sizes[name] for name in names)
            tensors = pluralize(len(names), "tensor")
            lines.append(f"from step {step}: {freed:,} of them learn ({tensors}): {self._modules(names)}")
        return lines

    def _select(self, what: str, patterns: Iterable[str]) -> set[str]:
        """First names of the parameters that any pattern stands for."""
        chosen: set[str] = set()
        for pattern in patterns:
            if pattern == ALL_BUT_HEAD:
                heads = find_heads(self.model)
                if not heads:
                    raise ValueError(f"{what} {ALL_BUT_HEAD!r}: no head was found in the model; name what to freeze")
                found = [name for name in self._first_name if not is_under(name, heads)]
            else:
                found = select(pattern, self._first_name)
            if not found:
                raise unmatched(what, pattern, self._first_name)
            chosen.update(self._first_name[name] for name in found)
        return chosen

    def _plan(self, stages: Sequence[tuple[int, Sequence[str]]]) -> dict[str, int]:
        """The step at which each name is set free, of those that ever are."""
        freed_at: dict[str, int] = {}
        for step, patterns in stages:
            if step < 1:
                raise ValueError(
                    f"unfreeze at step {step}: expected a step ≥ 1; what learns from the start is not frozen"
                )
            for pattern in patterns:
                chosen = self._select("unfreeze", [pattern])
                frozen = [name for name in self._initial if name in chosen and freed_at.get(name, step) == step]
                if not frozen:
                    raise ValueError(f"unfreeze {pattern!r} at step {step}: nothing that it matches is frozen by then")
                freed_at.update(dict.fromkeys(frozen, step))
        return freed_at

    def _modules(self, names: Iterable[str]) -> str:
        """The largest modules that these parameters fill, and the parameters outside of such modules."""
        chosen = set(names)
        inside = Counter(place for name in self._first_name for place in _places(name))
        filled = Counter(
            place for name, first in self._first_name.items() if first in chosen for place in _places(name)
        )
        largest = {
            next(place for place in _places(name) if filled[place] == inside[place]): None
            for name, first in self._first_name.items()
            if first in chosen
        }
        return join_first(list(largest), _SHOWN)


def _places(name: str) -> list[str]:
    """The modules that hold a parameter, the largest first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _norm_layers(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Each norm layer with the names of the parameters it is frozen with: its own, else those of the module above."""
    modules = dict(model.named_modules())
    layers = []
    for name, module in modules.items():
        if isinstance(module, NORM_TYPES) or "running_mean" in dict(module.named_buffers(recurse=False)):
            owner = name
            names = _names_below(owner, modules[owner])
            while owner and not names:
                owner = owner.rpartition(".")[0]
                names = _names_below(owner, modules[owner])
            layers.append((module, names))
    return layers


def _names_below(owner: str, module: nn.Module) -> list[str]:
    prefix = f"{owner}." if owner else ""
    return [prefix + name for name, _ in module.named_parameters(remove_duplicate=False)]
