"""Layer-wise learning rate decay: which layer a parameter belongs to, counted from the input.

Recognized are vision transformers (by MAE's rule), models with timm's `group_matcher`, residual nets, and nets with
their layers in one sequence called `features` or `stages`; also as the first part of a larger model, such as a
detector's backbone, whose rest is then the last layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn

from paceline.core.registry import register
from paceline.core.torchvision_ops import import_torchvision

LayerMap = Callable[[str], int | None]
"""From a parameter's name to its layer, 0 at the input; None for what comes after all layers, such as a head."""

_VIT_BLOCK = re.compile(r"(?:blocks\.|encoder\.layers\.encoder_layer_)(\d+)\.")
_VIT_STEM = re.compile(
    r"(?:encoder\.)?(?:(?:cls|class|dist|reg|mask)_token|pos_embed|pos_enc|patch_embed|conv_proj|norm_pre)"
)


@dataclass(frozen=True)
class Layers:
    """The layers of a model, from 0 to `num_layers`, the last, which has the full learning rate."""

    num_layers: int
    ids: Mapping[str, int]

    def id_of(self, name: str) -> int:
        """The layer of a parameter; an unknown one belongs to the last."""
        return self.ids.get(name, self.num_layers)

    def scale(self, name: str, decay: float) -> float:
        """The factor of a parameter's learning rate: `decay` to the power of its distance from the last layer."""
        return float(decay ** (self.num_layers - self.id_of(name)))


def find_layers(model: nn.Module, name: str | None = None) -> Layers:
    """The layers of a model, by its structure or by the map registered as `name`.

    Register a map with `@register.layer_map("mine")` on a function that takes the model and returns a function from a
    parameter's name to its layer, or to None for what comes after all layers.
    """
    if name is not None:
        return make_layers(model, _registered(name)(model))
    first = next((key for key, _ in model.named_parameters()), "")
    level = [("", model)]
    while level:
        maps = [(prefix, found) for prefix, part in level if (found := _recognize(part)) is not None]
        if len(maps) > 1:
            parts = ", ".join(prefix.rstrip(".") for prefix, _ in maps)
            raise ValueError(f"{type(model).__name__} has layers in several parts ({parts}); {_ADVICE}")
        if maps and first.startswith(maps[0][0]):  # otherwise something nearer to the input would have the full rate
            return make_layers(model, _with_prefix(*maps[0]))
        level = [(f"{prefix}{key}.", child) for prefix, part in level for key, child in part.named_children()]
    raise ValueError(f"layer_decay does not know the layers of {type(model).__name__}; {_ADVICE}")


_ADVICE = (
    'register a map with @register.layer_map("name") on a function that takes the model and returns a function '
    "from a parameter's name to its layer, 0 at the input, or to None for the head"
)


def _registered(name: str) -> Callable[[nn.Module], LayerMap]:
    maps = register.kind("layer_map")
    entry = maps.find(name)
    if entry is None:
        meant = get_close_matches(name, maps.names(), n=1)
        hint = f'did you mean "{meant[0]}"?' if meant else _ADVICE
        raise ValueError(f'unknown layer map "{name}"; {hint}')
    return entry.resolve()


def make_layers(model: nn.Module, layer_map: LayerMap) -> Layers:
    """The layers of a model by a map from the names of its parameters."""
    found: dict[str, Any] = {name: layer_map(name) for name, _ in model.named_parameters()}
    numbers = [number for number in found.values() if number is not None]
    for name, number in found.items():
        if number is not None and (not isinstance(number, int) or number < 0):
            raise ValueError(f"the layer map returned {number!r} for {name}, expected an integer ≥ 0 or None")
    if not numbers:
        raise ValueError(f"the layer map returned None for every parameter of {type(model).__name__}")
    last = max(numbers) + (len(numbers) < len(found))
    return Layers(last, {name: last if number is None else number for name, number in found.items()})


def _with_prefix(prefix: str, layer_map: LayerMap) -> LayerMap:
    return lambda name: layer_map(name.removeprefix(prefix)) if name.startswith(prefix) else None


def _recognize(model: nn.Module) -> LayerMap | None:
    rules = (_vision_transformer, _declared, _stages)
    return next((found for rule in rules if (found := rule(model)) is not None), None)


def _vision_transformer(model: nn.Module) -> LayerMap | None:
    """MAE's rule: 0 for tokens, positions and patches, k + 1 for block k, the last for the rest and the final norm."""
    children = dict(model.named_children())
    blocks = children.get("blocks") or getattr(children.get("encoder"), "layers", None)
    if not children.keys() & {"patch_embed", "conv_proj"} or not isinstance(blocks, nn.Sequential | nn.ModuleList):
        return None
    matcher: Any = getattr(model, "group_matcher", None)
    declared = matcher(coarse=False) if matcher else {}
    if not isinstance(declared, dict) or declared.keys() - {"stem", "blocks"}:
        return None  # it has more than a stack of blocks; see _declared

    def layer_of(name: str) -> int | None:
        if block := _VIT_BLOCK.match(name):
            return int(block[1]) + 1
        return 0 if _VIT_STEM.match(name) else None

    return layer_of


def _declared(model: nn.Module) -> LayerMap | None:
    """timm's `group_matcher`, block by block."""
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        return None
    import_torchvision()  # timm imports it, which fails without its compiled operators
    from timm.models import group_parameters

    ids: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
    # Some declarations are outdated, and find nothing but a stem or a head.
    return ids.get if max(ids.values()) > 1 else None


def _stages(model: nn.Module) -> LayerMap | None:
    """One layer for each block of `layer1`, `layer2`, …, or for each part of `features` or `stages`.

    A part that is a stage has a layer for each of its blocks. Downsampling between stages belongs to the first block
    after it; everything before the first part is layer 0.
    """
    children = dict(model.named_children())
    numbered = [key for key, child in children.items() if re.fullmatch(r"layer\d+", key) and list(child.children())]
    if len(numbered) > 1:
        name, parts = numbered[0], [(key, children[key]) for key in numbered]
    else:
        name = next((key for key in ("features", "stages") if isinstance(children.get(key), nn.Sequential)), "")
        parts = list(_trainable_children(name, children[name]).items()) if name else []
    if not parts:
        return None
    last_stage = max((index for index, (_, part) in enumerate(parts) if _is_stage(part)), default=0)
    layers = _before(children, name)
    pending: list[str] = []
    for index, (prefix, part) in enumerate(parts):
        if _is_stage(part):
            blocks = [[block] for block in _trainable_children(prefix, part)]
            blocks[0] += pending
            layers, pending = layers + blocks, []
        elif 0 < index < last_stage:
            pending.append(prefix)
        elif layers and all(parameter.ndim <= 1 for parameter in part.parameters()):
            layers[-1].append(prefix)  # a norm layer belongs to the convolution before it
        else:
            layers.append([prefix])
    return _in_order(layers)


def _is_stage(part: nn.Module) -> bool:
    """Whether it is a sequence of blocks rather than of single layers."""
    blocks = _trainable_children("", part).values()
    return isinstance(part, nn.Sequential) and bool(blocks) and all(list(block.children()) for block in blocks)


def _trainable_children(prefix: str, module: nn.Module) -> dict[str, nn.Module]:
    """The children with parameters, by full name."""
    return {f"{prefix}.{key}": child for key, child in module.named_children() if _has_parameters(child)}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _before(children: Mapping[str, nn.Module], name: str) -> list[list[str]]:
    """The children before that name as one layer, or none if they have no parameters."""
    names = list(children)
    stem = [key for key in names[: names.index(name)] if _has_parameters(children[key])]
    return [stem] if stem else []


def _in_order(layers: Iterable[list[str]]) -> LayerMap:
    """The map with one layer for each list of module names."""
    ids = {prefix: number for number, prefixes in enumerate(layers) for prefix in prefixes}

    def layer_of(name: str) -> int | None:
        while name and name not in ids:
            name = name.rpartition(".")[0]
        return ids.get(name)

    return layer_of
