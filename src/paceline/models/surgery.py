"""Loading weights into a model that differs: what the recipe declares is changed, everything else must match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.core.text import join_first
from paceline.models.patterns import is_inside, no_match, rename, select
from paceline.models.weight_resize import Shape, find_first_convs, fit_channels, fit_position_embedding, is_computed

_MAX_LINES, _MAX_NAMES = 10, 3
_HEAD_STD = {"trunc_normal": 2e-5, "normal": 0.01}  # trunc_normal as in MAE's fine-tuning

HeadInit = Literal["default", "zeros", "trunc_normal", "normal"]


@dataclass(frozen=True)
class Surgery:
    """How weights may differ from the model. Names are changed first: patterns match the model's names."""

    into: str | None = None
    """The module that the weights are for, such as `backbone`; the rest of the model keeps its random weights."""
    strip: Sequence[str] = ()
    """Prefixes to remove from the names, in this order."""
    rename: Sequence[tuple[str, str]] = ()
    """Patterns and replacements, in this order: `encoder.* → blocks.*`, or `re:` with groups."""
    exclude: Sequence[str] = ()
    """Patterns of tensors that are not loaded; in the model they keep their random weights."""
    head: Literal["auto", "keep", "drop"] | Sequence[str] = "auto"
    """`auto` replaces the head when its shapes differ, `drop` always, `keep` never; or the names of its modules."""
    head_init: HeadInit = "default"
    """The initialization of a head that was not loaded; `trunc_normal` has a std of 2e-5, as in MAE."""
    first_conv: Literal["auto", "strict"] = "auto"
    """`auto` fits the first convolution to the model's number of channels: RGB to gray, gray to RGB."""
    channels: Literal["rgb", "bgr"] = "rgb"
    """The channel order that the weights were trained with."""
    position_embedding: Literal["interpolate", "strict"] = "interpolate"
    """`interpolate` resizes position embeddings of another image size."""


@dataclass(frozen=True)
class Reshaped:
    """A tensor that was changed before it was loaded."""

    before: Shape
    after: Shape
    how: str


@dataclass(frozen=True)
class SurgeryReport:
    """Where each tensor of the weights and of the model ended."""

    loaded: list[str]
    """Loaded, the reshaped ones included."""
    reshaped: dict[str, Reshaped]
    replaced: dict[str, tuple[Shape, Shape]]
    """In both, but the model keeps its new ones, such as a head: shapes in the weights and in the model."""
    missing: list[str]
    """Not in the weights; the model keeps its random ones."""
    unexpected: list[str]
    """Not in the model."""
    excluded: list[str]
    """Excluded by the recipe, on either side."""

    def with_prefix(self, part: str, missing: list[str], unused: list[str]) -> SurgeryReport:
        """The report of the whole model: `missing` are its tensors outside the part, `unused` those of the file."""
        return SurgeryReport(
            [f"{part}.{name}" for name in self.loaded],
            {f"{part}.{name}": reshaped for name, reshaped in self.reshaped.items()},
            {f"{part}.{name}": shapes for name, shapes in self.replaced.items()},
            [*(f"{part}.{name}" for name in self.missing), *missing],
            unused,
            [f"{part}.{name}" for name in self.excluded],
        )

    def summary(self) -> list[str]:
        """A short table, one line for each kind."""
        rows: dict[str, list[str]] = {
            "reshaped": [f"{name} {_describe(one)}" for name, one in self.reshaped.items()],
            "replaced": [f"{name} {_change(*shapes)}" for name, shapes in self.replaced.items()],
            "missing": self.missing,
            "unexpected": self.unexpected,
            "excluded": self.excluded,
        }
        return [
            _row("loaded", len(self.loaded), []),
            *(_row(title, len(rows[title]), rows[title]) for title in rows if rows[title]),
        ]

    def as_dict(self) -> dict[str, Any]:
        reshaped = {n: {"weights": [*r.before], "model": [*r.after], "how": r.how} for n, r in self.reshaped.items()}
        replaced = {name: {"weights": [*old], "model": [*new]} for name, (old, new) in self.replaced.items()}
        return vars(self) | {"reshaped": reshaped, "replaced": replaced}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], surgery: Surgery) -> SurgeryReport:
    """Load weights after the declared surgery; any other difference is a CheckpointError and changes nothing."""
    if surgery.into is not None:
        return _apply_into(surgery.into, model, weights, surgery)
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    weights = _rename(weights, surgery)
    excluded = _match_all(surgery.exclude, list(dict.fromkeys([*weights, *own])))
    heads = _heads(model, surgery.head, [*own, *weights])
    given = {name: tensor for name, tensor in weights.items() if name not in excluded}
    new_heads = [head for head in heads if surgery.head == "drop" or _is_replaced(head, own, given)]
    fitting = {name: tensor for name, tensor in given.items() if name in own and not is_inside(name, new_heads)}

    changed = _reshape(model, own, fitting, surgery)
    tensors = {name: changed[name][0] if name in changed else tensor for name, tensor in fitting.items()}
    loaded = [name for name in own if name in tensors and tensors[name].shape == own[name].shape]
    explained = set(loaded)
    replaced = {
        name: (_shape(given[name]), _shape(own[name]))
        for name in own
        if name in given and (is_inside(name, new_heads) or (name not in explained and _may_differ(name, surgery)))
    }
    missing = [name for name in own if name not in given and name not in excluded]
    unexpected = [name for name in given if name not in own]
    explained.update(replaced)
    _check_explained(
        {name: (_shape(given[name]), _shape(own[name])) for name in fitting if name not in explained},
        {name: _shape(own[name]) for name in missing if not (is_inside(name, new_heads) or _may_lack(name))},
        {name: _shape(given[name]) for name in unexpected if not (is_inside(name, new_heads) or is_computed(name))},
        own,
    )

    model.load_state_dict({name: tensors[name] for name in loaded}, strict=False)
    _initialize(model, new_heads, surgery.head_init)
    reshaped = {name: change for name, (_, change) in changed.items()}
    return SurgeryReport(loaded, reshaped, replaced, missing, unexpected, [*excluded])


def _apply_into(name: str, model: nn.Module, weights: Mapping[str, Tensor], surgery: Surgery) -> SurgeryReport:
    """Load one module completely; tensors that it does not have, such as a classifier, are not used."""
    part = dict(model.named_modules()).get(name)
    if part is None or not name:
        raise no_match("into", name, [module for module, _ in model.named_modules() if module])
    own, named = part.state_dict(), _rename(weights, surgery)
    unused = [each for each in named if each not in own]
    given = {each: tensor for each, tensor in named.items() if each in own}
    report = load_weights(part, given, replace(surgery, into=None, strip=(), rename=(), head="keep"))
    if surgery.head_init != "default":
        _initialize(model, find_heads(model), surgery.head_init)
    missing = [each for each in model.state_dict() if not is_inside(each, [name])]
    return report.with_prefix(name, missing, unused)


def find_heads(model: nn.Module) -> list[str]:
    """The names of the classifier modules: as the model declares them, or its last linear layer or 1×1 convolution."""
    if callable(getter := getattr(model, "get_classifier", None)):
        found = getter()
        modules = found if isinstance(found, tuple | list) else (found,)
        names = [name for name, module in model.named_modules() if any(module is one for one in modules)]
        if names:
            return names
    config: Any = getattr(model, "default_cfg", None) or {}
    if classifier := config.get("classifier"):
        return [classifier] if isinstance(classifier, str) else list(classifier)
    num_classes = getattr(model, "num_classes", None)
    counts = {name: _num_outputs(module) for name, module in model.named_modules()}
    layers = [name for name, count in counts.items() if count is not None and num_classes in (None, count)]
    return layers[-1:]


def head_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the classifier modules."""
    return [parameter for name in find_heads(model) for parameter in model.get_submodule(name).parameters()]


def add_head_batch_norm(model: nn.Module) -> None:
    """Put a BatchNorm without affine parameters before the classifier, as MAE's linear probing does."""
    heads = {name: model.get_submodule(name) for name in find_heads(model)}
    others = [f"{name}, a {type(head).__name__}" for name, head in heads.items() if not isinstance(head, nn.Linear)]
    if others or not heads:
        raise ValueError(f"expected a linear classifier, found {others[0] if others else 'none'}")
    for name, head in heads.items():
        assert isinstance(head, nn.Linear)
        norm = nn.BatchNorm1d(head.in_features, eps=1e-6, affine=False)
        model.set_submodule(name, nn.Sequential(norm, head))


def _num_outputs(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.Conv2d) and set(module.kernel_size) == {1}:
        return module.out_channels
    return None


def _rename(weights: Mapping[str, Tensor], surgery: Surgery) -> dict[str, Tensor]:
    named = dict(weights)
    for prefix in surgery.strip:
        start = prefix.removesuffix(".") + "."
        named = _replace_names(named, "strip", prefix, {n: n.removeprefix(start) for n in named if n.startswith(start)})
    for pattern, replacement in surgery.rename:
        named = _replace_names(named, "rename", pattern, rename(pattern, replacement, named))
    return named


def _replace_names(weights: dict[str, Tensor], what: str, pattern: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    if not names:
        raise no_match(what, pattern, weights)
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        new = names.get(name, name)
        if new in renamed or not new:
            raise ValueError(
                f"{what} {pattern!r} gives {name!r} the name {new!r}, which {'is taken' if new else 'is empty'}"
            )
        renamed[new] = tensor
    return renamed


def _match_all(patterns: Iterable[str], names: list[str]) -> dict[str, None]:
    excluded: dict[str, None] = {}
    for pattern in patterns:
        found = select(pattern, names)
        if not found:
            raise no_match("exclude", pattern, names)
        excluded.update(dict.fromkeys(found))
    return excluded


def _heads(model: nn.Module, head: str | Sequence[str], names: list[str]) -> list[str]:
    match head:
        case "keep":
            return []
        case "auto" | "drop":
            found = find_heads(model)
            if head == "drop" and not found:
                raise ValueError("head: drop found no head in the model; list its modules instead")
            return found
        case str():
            raise ValueError(f"head {head!r}: expected auto, keep, drop or a list of module names")
    for module in head:
        if not any(is_inside(name, [module]) for name in names):
            raise no_match("head", module, names)
    return list(head)


def _is_replaced(head: str, own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    # If one tensor of a head cannot be loaded, none of the head is.
    shared = [name for name in own if name in weights and is_inside(name, [head])]
    return not shared or any(own[name].shape != weights[name].shape for name in shared)


def _reshape(
    model: nn.Module, own: Mapping[str, Tensor], weights: Mapping[str, Tensor], surgery: Surgery
) -> dict[str, tuple[Tensor, Reshaped]]:
    """The tensors that the surgery changes, and how."""
    changed: dict[str, tuple[Tensor, Reshaped]] = {}
    kernels = [f"{name}.weight" for name in find_first_convs(model)]
    if surgery.channels == "bgr" and not any(kernel in weights for kernel in kernels):
        raise ValueError("channels: bgr needs a first convolution in the weights, and there is none")
    for name, tensor in weights.items():
        shape = _shape(own[name])
        if name in kernels:
            fitted = _fit_kernel(name, tensor, shape, surgery)
        elif tensor.shape != shape and surgery.position_embedding == "interpolate":
            fitted = fit_position_embedding(name, tensor, shape, model)
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
        kernel = kernel.flip(1)
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
        is_layer = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if how == "default" or not is_layer or not is_inside(name, names):
            continue
        if how == "zeros":
            nn.init.zeros_(module.weight)
        elif how == "trunc_normal":
            nn.init.trunc_normal_(module.weight, std=_HEAD_STD[how])
        else:
            nn.init.normal_(module.weight, std=_HEAD_STD[how])
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _may_differ(name: str, surgery: Surgery) -> bool:
    return surgery.position_embedding == "interpolate" and is_computed(name)


def _may_lack(name: str) -> bool:
    # Files of old PyTorch versions lack the batch count, which only BatchNorm without momentum reads.
    return is_computed(name) or name.rpartition(".")[2] == "num_batches_tracked"


def _shape(tensor: Tensor) -> Shape:
    return tuple(tensor.shape)


def _check_explained(
    shapes: Mapping[str, tuple[Shape, Shape]],
    missing: Mapping[str, Shape],
    unexpected: Mapping[str, Shape],
    own: Mapping[str, Tensor],
) -> None:
    """Raise a CheckpointError with every kind of difference that no declared surgery explains, if there is one."""
    kinds = {
        "with another shape (weights → model)": [f"{name} {_change(*each)}" for name, each in shapes.items()],
        "missing from the weights": [f"{name} {list(shape)}" for name, shape in missing.items()],
        "not in the model": [f"{name} {list(shape)}" for name, shape in unexpected.items()],
    }
    lines = []
    for kind, names in kinds.items():
        if names:
            lines += [f"  {len(names)} {kind}:", *(f"    {name}" for name in names[:_MAX_LINES])]
            lines += [f"    and {len(names) - _MAX_LINES} more"] if len(names) > _MAX_LINES else []
    if lines:
        raise CheckpointError("\n".join(["the weights do not match the model:", *lines, *_advise(unexpected, own)]))


def _advise(unexpected: Mapping[str, Shape], own: Mapping[str, Tensor]) -> list[str]:
    """The prefix to strip that would explain most of the unexpected names, if there is one."""
    prefixes: Counter[str] = Counter()
    for name in unexpected:
        parts = name.split(".")
        prefixes.update(".".join(parts[:end]) for end in range(1, len(parts)) if ".".join(parts[end:]) in own)
    for prefix, number in prefixes.most_common(1):
        if number * 2 >= len(unexpected):
            return [f"  add weights.strip: [{prefix}]; {number} of these names are in the model without that prefix"]
    return []


def _describe(one: Reshaped) -> str:
    return f"({one.how})" if one.before == one.after else f"{_change(one.before, one.after)} ({one.how})"


def _change(before: Shape, after: Shape) -> str:
    return f"{list(before)} → {list(after)}"


def _row(title: str, count: int, names: list[str]) -> str:
    tensors = "tensor " if count == 1 else "tensors"
    return f"{title:<10} {count:>5} {tensors}  {join_first(names, _MAX_NAMES)}".rstrip()
