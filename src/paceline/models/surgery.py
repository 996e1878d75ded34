"""Fitting a state dict into a model: what is declared is changed, and then everything must match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from paceline.models.module_types import find_first_convolutions, fit_channels, reverse_channels
from paceline.models.patterns import is_under, rename, select, unmatched
from paceline.models.position_embeddings import fit_positions, is_computed
from paceline.models.surgery_report import Differences, Reshaped, Shape, SurgeryReport

__all__ = ["Surgery", "SurgeryReport", "apply", "find_heads", "fit"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TINY = 2e-5  # a new head of MAE's finetuning: logits start at almost zero
_SMALL = 0.01

HeadInit = Literal["default", "zeros", "trunc_normal", "normal"]


@dataclass(frozen=True)
class Surgery:
    """How weights may differ from the model. Names are changed first: all patterns see the model's names."""

    into: str | None = None
    """The part of the model that they are for, such as `backbone`: names are that part's, the rest stays fresh."""
    strip: Sequence[str] = ()
    """Prefixes that are taken off the names, in this order."""
    rename: Sequence[tuple[str, str]] = ()
    """Patterns and what takes their place, in this order: `encoder.* → blocks.*`, or `re:` with groups."""
    exclude: Sequence[str] = ()
    """Patterns of tensors that are not loaded; a part that only the model has stays fresh."""
    head: Literal["auto", "keep", "drop"] | Sequence[str] = "auto"
    """`auto` replaces the head when its shapes differ, `drop` always, `keep` never; or the modules that make it up."""
    head_init: HeadInit = "default"
    """How the layers of a head that was not loaded start; `trunc_normal` is MAE's, 2e-5 wide."""
    first_conv: Literal["auto", "strict"] = "auto"
    """`auto` fits the first convolution to the model's number of channels: RGB to gray, gray to RGB."""
    channels: Literal["rgb", "bgr"] = "rgb"
    """The order of channels that the weights were made for."""
    position_embedding: Literal["interpolate", "strict"] = "interpolate"
    """`interpolate` resamples tables of positions that were learned for another image size."""


def fit(model: nn.Module, weights: Mapping[str, Tensor]) -> SurgeryReport:
    """Load weights with the surgery that needs no declaration: a new head, other channels, another image size."""
    return apply(model, weights, Surgery())


def apply(model: nn.Module, weights: Mapping[str, Tensor], surgery: Surgery) -> SurgeryReport:
    """Load weights after the declared surgery; what it does not explain is an error, and the model is as before."""
    if surgery.into is not None:
        return _apply_into(surgery.into, model, weights, surgery)
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    weights = _renamed(weights, surgery)
    excluded = _excluded(surgery.exclude, list(dict.fromkeys([*weights, *own])))
    heads = _heads(model, surgery.head, [*own, *weights])
    given = {name: tensor for name, tensor in weights.items() if name not in excluded}
    fresh = [head for head in heads if surgery.head == "drop" or _is_replaced(head, own, given)]
    fitting = {name: tensor for name, tensor in given.items() if name in own and not is_under(name, fresh)}

    changed = _changed(model, own, fitting, surgery)
    tensors = {name: changed[name][0] if name in changed else tensor for name, tensor in fitting.items()}
    loaded = [name for name in own if name in tensors and tensors[name].shape == own[name].shape]
    settled = set(loaded)
    replaced = {
        name: (_shape(given[name]), _shape(own[name]))
        for name in own
        if name in given and (is_under(name, fresh) or (name not in settled and _may_differ(name, surgery)))
    }
    missing = [name for name in own if name not in given and name not in excluded]
    unexpected = [name for name in given if name not in own]
    settled.update(replaced)
    Differences(
        {name: (_shape(given[name]), _shape(own[name])) for name in fitting if name not in settled},
        {name: _shape(own[name]) for name in missing if not (is_under(name, fresh) or _may_lack(name))},
        {name: _shape(given[name]) for name in unexpected if not (is_under(name, fresh) or is_computed(name))},
    ).refuse(own)

    model.load_state_dict({name: tensors[name] for name in loaded}, strict=False)
    _initialize(model, fresh, surgery.head_init)
    reshaped = {name: change for name, (_, change) in changed.items()}
    return SurgeryReport(loaded, reshaped, replaced, missing, unexpected, [*excluded])


def _apply_into(name: str, model: nn.Module, weights: Mapping[str, Tensor], surgery: Surgery) -> SurgeryReport:
    """All of one part is loaded; what that part does not have, the classifier of a backbone, is left."""
    part = dict(model.named_modules()).get(name)
    if part is None or not name:
        raise unmatched("into", name, [module for module, _ in model.named_modules() if module])
    own, named = part.state_dict(), _renamed(weights, surgery)
    unused = [each for each in named if each not in own]
    given = {each: tensor for each, tensor in named.items() if each in own}
    fitted = apply(part, given, replace(surgery, into=None, strip=(), rename=(), head="keep"))
    if surgery.head_init != "default":
        _initialize(model, find_heads(model), surgery.head_init)
    fresh = [each for each in model.state_dict() if not is_under(each, [name])]
    return fitted.inside(name, fresh, unused)


def find_heads(model: nn.Module) -> list[str]:
    """The names of the modules that classify: as the model says itself, else its last layer of that kind."""
    if callable(getter := getattr(model, "get_classifier", None)):
        found = getter()
        modules = found if isinstance(found, tuple | list) else (found,)
        names = [name for name, module in model.named_modules() if any(module is one for one in modules)]
        if names:
            return names
    described: Any = getattr(model, "default_cfg", None) or {}
    if classifier := described.get("classifier"):
        return [classifier] if isinstance(classifier, str) else list(classifier)
    num_classes = getattr(model, "num_classes", None)
    outputs = [(name, _num_outputs(module)) for name, module in model.named_modules()]
    layers = [(name, count) for name, count in outputs if count is not None]
    fitting = [name for name, count in layers if num_classes is None or count == num_classes]
    return fitting[-1:]


def _num_outputs(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.Conv2d) and set(module.kernel_size) == {1}:
        return module.out_channels
    return None


def _renamed(weights: Mapping[str, Tensor], surgery: Surgery) -> dict[str, Tensor]:
    named = dict(weights)
    for prefix in surgery.strip:
        start = prefix.removesuffix(".") + "."
        named = _with_names(named, "strip", prefix, {n: n.removeprefix(start) for n in named if n.startswith(start)})
    for pattern, replacement in surgery.rename:
        named = _with_names(named, "rename", pattern, rename(pattern, replacement, named))
    return named


def _with_names(weights: dict[str, Tensor], what: str, pattern: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    if not names:
        raise unmatched(what, pattern, weights)
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        new = names.get(name, name)
        if new in renamed or not new:
            raise ValueError(
                f"{what} {pattern!r} gives {name!r} the name {new!r}, which {'is taken' if new else 'is empty'}"
            )
        renamed[new] = tensor
    return renamed


def _excluded(patterns: Iterable[str], names: list[str]) -> dict[str, None]:
    excluded: dict[str, None] = {}
    for pattern in patterns:
        found = select(pattern, names)
        if not found:
            raise unmatched("exclude", pattern, names)
        excluded.update(dict.fromkeys(found))
    return excluded


def _heads(model: nn.Module, head: str | Sequence[str], names: list[str]) -> list[str]:
    match head:
        case "keep":
            return []
        case "auto" | "drop":
            found = find_heads(model)
            if head == "drop" and not found:
                raise ValueError("head: drop found no head in the model; name its modules instead")
            return found
        case str():
            raise ValueError(f"head {head!r}: expected auto, keep, drop or a list of module names")
    for module in head:
        if not any(is_under(name, [module]) for name in names):
            raise unmatched("head", module, names)
    return list(head)


def _is_replaced(head: str, own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    # A head is one thing: where a part of it cannot be taken over, none of it is.
    shared = [name for name in own if name in weights and is_under(name, [head])]
    return not shared or any(own[name].shape != weights[name].shape for name in shared)


def _changed(
    model: nn.Module, own: Mapping[str, Tensor], weights: Mapping[str, Tensor], surgery: Surgery
) -> dict[str, tuple[Tensor, Reshaped]]:
    """The tensors that the surgery changes, those included whose shape it cannot fit."""
    changed: dict[str, tuple[Tensor, Reshaped]] = {}
    kernels = [f"{name}.weight" for name in find_first_convolutions(model)]
    if surgery.channels == "bgr" and not any(kernel in weights for kernel in kernels):
        raise ValueError("channels: bgr needs a first convolution that is loaded, and the weights have none")
    for name, tensor in weights.items():
        shape = _shape(own[name])
        if name in kernels:
            fitted = _fit_kernel(name, tensor, shape, surgery)
        elif tensor.shape != shape and surgery.position_embedding == "interpolate":
            fitted = fit_positions(name, tensor, shape, model)
        else:
            fitted = None
        if fitted:
            changed[name] = (fitted[0], Reshaped(_shape(tensor), shape, fitted[1]))
    return changed


def _fit_kernel(name: str, kernel: Tensor, shape: Shape, surgery: Surgery) -> tuple[Tensor, str] | None:
    notes = []
    if surgery.channels == "bgr":
        if kernel.ndim < 3 or kernel.shape[1] != 3:
            raise ValueError(f"channels: bgr needs a first convolution of 3 channels, {name} has {list(kernel.shape)}")
        kernel = reverse_channels(kernel)
        notes.append("from BGR to RGB")
    fits_otherwise = kernel.ndim == len(shape) and (kernel.shape[0], *kernel.shape[2:]) == (shape[0], *shape[2:])
    if surgery.first_conv == "auto" and fits_otherwise and kernel.ndim > 2 and kernel.shape[1] != shape[1]:
        fitted = fit_channels(kernel, shape[1])
        if fitted:
            kernel = fitted[0]
            notes.append(fitted[1])
    return (kernel, ", ".join(notes)) if notes else None


def _initialize(model: nn.Module, heads: Iterable[str], how: HeadInit) -> None:
    names = list(heads)
    for name, module in model.named_modules():
        if how == "default" or not is_under(name, names) or not isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
            continue
        if how == "zeros":
            nn.init.zeros_(module.weight)
        elif how == "trunc_normal":
            nn.init.trunc_normal_(module.weight, std=_TINY)
        else:
            nn.init.normal_(module.weight, std=_SMALL)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _may_differ(name: str, surgery: Surgery) -> bool:
    return surgery.position_embedding == "interpolate" and is_computed(name)


def _may_lack(name: str) -> bool:
    # Files from before PyTorch counted batches lack the count, and only averaging without momentum reads it.
    return is_computed(name) or name.rpartition(".")[2] == "num_batches_tracked"


def _shape(tensor: Tensor) -> Shape:
    return tuple(tensor.shape)
