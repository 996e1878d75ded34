"""Which learning rate and decay each parameter gets: by its kind, by rules on its name, by its layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from paceline.models.norm import BATCH_NORMS, INSTANCE_NORMS, is_norm
from paceline.models.patterns import matcher, no_match
from paceline.optim.group_presets import Rule, Settings, general_kind
from paceline.optim.layer_decay import Layers, find_layers

_NORM_TYPES: dict[str, tuple[type[nn.Module], ...]] = {
    "batch_norm": BATCH_NORMS,
    "group_norm": (nn.GroupNorm,),
    "layer_norm": (nn.LayerNorm,),
    "instance_norm": INSTANCE_NORMS,
    "rms_norm": (nn.RMSNorm,),
}
_TABLE = re.compile(r"token|embed|table|position|(?:^|_)(?:pos|rel)(?:_|$)")
_BIAS = re.compile(r"bias(?:_.*)?|.*_bias")


@dataclass(frozen=True)
class Found:
    """A parameter of a model with its full name and its kind."""

    name: str
    parameter: nn.Parameter
    kind: str


@dataclass
class Group:
    """Parameters that share their learning rate and decay."""

    names: list[str]
    parameters: list[nn.Parameter]
    lr_scale: float
    weight_decay: float
    label: str

    def as_optimizer_group(self, lr: float) -> dict[str, Any]:
        """The group as torch's optimizers take it, for the learning rate `lr` before factors."""
        return {
            "params": self.parameters,
            "lr": lr * self.lr_scale,
            "weight_decay": self.weight_decay,
            "lr_scale": self.lr_scale,
            "param_names": self.names,
            "label": self.label,
        }


class RulesError(ValueError):
    """Rules that match nothing: `problems` holds the index of each and a message."""

    def __init__(self, problems: list[tuple[int, str]]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"rule {index + 1}: {problem}" for index, problem in problems))


def find_parameters(model: nn.Module) -> list[Found]:
    """All parameters in the model's order with their kinds; a shared one appears once, by its first name."""
    seen: set[nn.Parameter] = set()
    found = []
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                name = f"{prefix}.{own_name}" if prefix else own_name
                found.append(Found(name, parameter, _kind(name, module, parameter)))
    return found


def build_groups(
    model: nn.Module,
    weight_decay: float,
    kinds: Mapping[str, Settings] = MappingProxyType({}),
    rules: Sequence[Rule] = (),
    layers: Layers | None = None,
    layer_decay: float | None = None,
    no_decay_1d: bool = False,
    use_no_weight_decay: bool = False,
) -> list[Group]:
    """The parameters that learn, each in one group; groups of equal learning rate and decay are one.

    The factors of kind, rules and layer multiply in that order. Decay is the optimizer's, unless the kind gives
    another; then the two exceptions take it away; a rule that gives one has the last word. With `layer_decay` and
    no `layers`, these are found by the model's structure.
    """
    if layer_decay is not None and not layer_decay > 0:
        raise ValueError(f"layer-wise decay: expected a number > 0, got {layer_decay}")
    found = find_parameters(model)
    matching = _match_rules(rules, found)
    if layer_decay is not None and layers is None:
        layers = find_layers(model)
    excepted = _without_decay(model, found, no_decay_1d, use_no_weight_decay)

    members: dict[tuple[float, float], list[_Member]] = {}
    for one, meant in zip(found, matching, strict=True):
        if not one.parameter.requires_grad:
            continue
        settings = _settings(one.kind, kinds)
        factors = [1.0 if settings.lr_scale is None else settings.lr_scale, *(rule.lr_scale for rule in meant)]
        decays = [weight_decay, settings.weight_decay, 0.0 if one.name in excepted else None]
        decays += [rule.weight_decay for rule in meant]
        layer = None
        if layers is not None and layer_decay is not None:
            layer = layers.id_of(one.name)
            factors.append(layers.scale(one.name, layer_decay))
        key = (prod(factors), [decay for decay in decays if decay is not None][-1])
        members.setdefault(key, []).append(_Member(one, meant, layer))
    named_kinds = {*kinds, *(rule.kind for rule in rules)}
    labels = [_label(each, named_kinds) for each in members.values()]
    times = Counter(labels)
    groups = []
    for label, ((lr_scale, decay), own) in zip(labels, members.items(), strict=True):
        unique = label if times[label] == 1 else f"{label} · ×{lr_scale:g}, decay {decay:g}"
        names, parameters = [each.found.name for each in own], [each.found.parameter for each in own]
        groups.append(Group(names, parameters, lr_scale, decay, unique))
    return groups


class _Member(NamedTuple):
    """A parameter of a group, and what brought it there."""

    found: Found
    rules: Sequence[Rule]
    layer: int | None


def _label(members: Sequence[_Member], named_kinds: set[str | None]) -> str:
    kinds = [one.found.kind if one.found.kind in named_kinds else general_kind(one.found.kind) for one in members]
    patterns = [rule.match for one in members for rule in one.rules]
    numbers = sorted({one.layer for one in members if one.layer is not None})
    layers = f"layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""
    parts = [", ".join(dict.fromkeys(kinds)), ", ".join(dict.fromkeys(patterns)), layers]
    return " · ".join(part for part in parts if part)


def _kind(name: str, module: nn.Module, parameter: nn.Parameter) -> str:
    *path, own_name = name.split(".")
    if norm := _norm_kind(module):
        return norm
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(module, ParametrizationList):
        own_name = path[-1]  # …parametrizations.weight.original
    if "weight" in own_name:
        return "weight"
    if _TABLE.search(own_name):
        return "embedding"
    if _BIAS.fullmatch(own_name):
        return "bias"
    # What a module with layers of its own holds itself is a table, unless it is one factor a channel (layer scale).
    is_factor = parameter.ndim <= 1 or parameter.shape[-1] == 1
    return "weight" if is_factor or not _has_layers(module) else "embedding"


def _norm_kind(module: nn.Module) -> str | None:
    for kind, types in _NORM_TYPES.items():
        if isinstance(module, types):
            return kind
    if not is_norm(module) or _has_layers(module):
        return None
    plain = type(module).__name__.casefold()
    return next((kind for kind in _NORM_TYPES if kind.replace("_", "") in plain), "other_norm")


def _has_layers(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def _settings(kind: str, kinds: Mapping[str, Settings]) -> Settings:
    none = Settings()
    return kinds.get(kind, none).over(kinds.get(general_kind(kind), none))


def _without_decay(model: nn.Module, found: Iterable[Found], no_decay_1d: bool, use_no_weight_decay: bool) -> set[str]:
    """The names of one-dimensional parameters and of those that modules list, where these are enabled.

    A module lists names or globs below itself with `no_weight_decay()`, as timm's and MAE's models do.
    """
    patterns: list[str] = []
    for prefix, module in model.named_modules() if use_no_weight_decay else ():
        listing: Any = getattr(module, "no_weight_decay", None)
        if callable(listing):
            patterns += [f"{prefix}.{pattern}" if prefix else pattern for pattern in listing()]
    exact, globs = set(patterns), [pattern for pattern in patterns if "*" in pattern]
    return {
        one.name
        for one in found
        if (no_decay_1d and one.parameter.ndim <= 1)
        or one.name in exact
        or any(fnmatchcase(one.name, pattern) for pattern in globs)
    }


def _match_rules(rules: Sequence[Rule], found: Sequence[Found]) -> list[list[Rule]]:
    """The rules of each parameter, in their order; raises RulesError for rules that match none."""
    matching: list[list[Rule]] = [[] for _ in found]
    problems: list[tuple[int, str]] = []
    for number, rule in enumerate(rules):
        try:
            is_match = matcher(rule.match)
        except ValueError as error:
            problems.append((number, str(error)))
            continue
        named = [index for index, one in enumerate(found) if is_match(one.name)]
        meant = [i for i in named if rule.kind in (None, found[i].kind, general_kind(found[i].kind))]
        for index in meant:
            matching[index].append(rule)
        if not meant and not rule.may_match_none:
            problems.append((number, _explain_idle(rule, [found[index] for index in named], found)))
    if problems:
        raise RulesError(problems)
    return matching


def _explain_idle(rule: Rule, named: Sequence[Found], found: Sequence[Found]) -> str:
    if named:
        kinds = ", ".join(dict.fromkeys(one.kind for one in named))
        return f'"{rule.match}" matches no parameter of kind {rule.kind}; those it matches are of kind {kinds}'
    return str(no_match("match", rule.match, [one.name for one in found]))
