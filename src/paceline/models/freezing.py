"""Frozen parameters: for the whole run, or until they are unfrozen at a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from paceline.core.errors import ArgumentError
from paceline.core.text import join_first, pluralize
from paceline.models.norm import NORM_TYPES
from paceline.models.patterns import is_inside, no_match, select
from paceline.models.surgery import find_heads

ALL_BUT_HEAD = "all_but_head"
_MAX_NAMES = 6


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """Re-raise a ValueError as that of an argument."""
    try:
        yield
    except ValueError as error:
        raise ArgumentError(argument, str(error)) from error


class Freezing:
    """Parameters frozen by name patterns, and the steps at which some are unfrozen.

    A pattern is a glob, which also selects everything inside a module, a `re:` expression, or `all_but_head`. Frozen
    parameters have no gradient, and frozen norm layers stay in eval mode. What is frozen follows from the step alone.
    """

    def __init__(
        self, model: nn.Module, patterns: Sequence[str] = (), unfreeze: Sequence[tuple[int, Sequence[str]]] = ()
    ) -> None:
        self.model = model
        # A shared parameter has several names: any of them selects it, the first one identifies it.
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        everything = list(model.named_parameters(remove_duplicate=False))
        self._first_name = {name: first[id(parameter)] for name, parameter in everything}
        # What a model itself keeps fixed, such as a computed position embedding, is never unfrozen.
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        with _naming("freeze"):
            selected = self._select("freeze", patterns)
            self._initial = [name for name in trainable if name in selected]
            self._fixed = selected.difference(trainable)
            if self._initial and len(self._initial) == len(trainable):
                raise ValueError(f"freeze {', '.join(map(repr, patterns))} leaves nothing to train")
        self._unfreeze_at: dict[str, int] = {}
        for index, (step, stage) in sorted(enumerate(unfreeze), key=lambda each: each[1][0]):
            with _naming(f"unfreeze.{index}"):
                self._unfreeze(step, stage)
        self.unfreeze_steps: tuple[int, ...] = tuple(sorted(set(self._unfreeze_at.values())))
        self._norms = _norm_layers(model)
        self._frozen_norms: list[nn.Module] = []
        self.apply(0)

    def frozen_at(self, step: int) -> list[str]:
        """Names of the parameters that are frozen at this step, in the model's order."""
        return [name for name in self._initial if step < self._unfreeze_at.get(name, step + 1)]

    def due(self, step: int) -> list[str]:
        """Names of the parameters that are unfrozen at this step, in the model's order."""
        return [name for name in self._initial if self._unfreeze_at.get(name) == step]

    def apply(self, step: int) -> None:
        """Set `requires_grad` and frozen norm layers for this step."""
        frozen = set(self.frozen_at(step))
        for name in self._initial:
            parameter = self.model.get_parameter(name)
            parameter.requires_grad_(name not in frozen)
            if name in frozen:
                parameter.grad = None
        for module in self._frozen_norms:
            module.train(self.model.training)
        fixed = frozen | self._fixed
        self._frozen_norms = [
            module
            for module, names in self._norms
            if names and fixed.issuperset(map(self._first_name.__getitem__, names))
        ]
        for module in self._frozen_norms:
            module.eval()

    def train_mode(self, model: nn.Module) -> None:
        """Put the model, which may be wrapped, into training mode, frozen norm layers excepted."""
        model.train()
        for module in self._frozen_norms:
            module.eval()

    def describe(self) -> list[str]:
        """What is frozen at the start and what is unfrozen when, as lines of text; none if nothing is frozen."""
        if not self._initial:
            return []
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        frozen = sum(map(sizes.__getitem__, self._initial))
        tensors = f"{len(self._initial)} of {len(sizes)} tensors"
        lines = [f"frozen: {frozen:,} of {sum(sizes.values()):,} parameters ({tensors}): {self.modules(self._initial)}"]
        for step in self.unfreeze_steps:
            names = self.due(step)
            freed, tensors = sum(map(sizes.__getitem__, names)), pluralize(len(names), "tensor")
            lines.append(f"unfrozen at step {step}: {freed:,} of them ({tensors}): {self.modules(names)}")
        return lines

    def describe_unfrozen(self, step: int) -> str:
        """What begins to learn with this step, in a line for a reader."""
        names = self.due(step)
        freed = sum(self.model.get_parameter(name).numel() for name in names)
        return f"unfrozen at step {step}: {pluralize(freed, 'parameter')} begin to learn: {self.modules(names)}"

    def _select(self, what: str, patterns: Iterable[str]) -> set[str]:
        """First names of the parameters that any pattern selects."""
        selected: set[str] = set()
        for pattern in patterns:
            if pattern == ALL_BUT_HEAD:
                heads = find_heads(self.model)
                if not heads:
                    raise ValueError(
                        f"{what} {ALL_BUT_HEAD!r}: no head was found in the model; list the modules to freeze"
                    )
                found = [name for name in self._first_name if not is_inside(name, heads)]
            else:
                found = select(pattern, self._first_name)
            if not found:
                raise no_match(what, pattern, self._first_name)
            selected.update(self._first_name[name] for name in found)
        return selected

    def _unfreeze(self, step: int, patterns: Sequence[str]) -> None:
        """Note that these begin to learn at this step."""
        if step < 1:
            raise ValueError(
                f"unfreeze at step {step}: expected a step ≥ 1; remove from freeze what trains from the start"
            )
        for pattern in patterns:
            selected, known = self._select("unfreeze", [pattern]), self._unfreeze_at
            frozen = [name for name in self._initial if name in selected and known.get(name, step) == step]
            if not frozen:
                raise ValueError(f"unfreeze {pattern!r} at step {step}: it matches nothing that is still frozen")
            known.update(dict.fromkeys(frozen, step))

    def modules(self, names: Iterable[str]) -> str:
        """The largest modules that consist of these parameters, and the parameters outside of such modules."""
        selected = set(names)
        inside = Counter(prefix for name in self._first_name for prefix in _prefixes(name))
        filled = Counter(
            prefix for name, first in self._first_name.items() if first in selected for prefix in _prefixes(name)
        )
        largest = {
            next(prefix for prefix in _prefixes(name) if filled[prefix] == inside[prefix]): None
            for name, first in self._first_name.items()
            if first in selected
        }
        return join_first(list(largest), _MAX_NAMES)


def _prefixes(name: str) -> list[str]:
    """The modules that hold a parameter, the outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _norm_layers(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Each norm layer with the parameters it is frozen with: its own, or those of the parent if it has none."""
    modules = dict(model.named_modules())
    layers = []
    for name, module in modules.items():
        if isinstance(module, NORM_TYPES) or "running_mean" in dict(module.named_buffers(recurse=False)):
            owner = name
            names = _parameter_names(owner, modules[owner])
            while owner and not names:
                owner = owner.rpartition(".")[0]
                names = _parameter_names(owner, modules[owner])
            layers.append((module, names))
    return layers


def _parameter_names(owner: str, module: nn.Module) -> list[str]:
    prefix = f"{owner}." if owner else ""
    return [prefix + name for name, _ in module.named_parameters(remove_duplicate=False)]
