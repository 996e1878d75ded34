"""Fitting a state dict into a model: all must match, except a head made for other classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from paceline.core.errors import CheckpointError

Shape = tuple[int, ...]
_SHOWN = 10


@dataclass(frozen=True)
class Fitted:
    """What became of each tensor; `missing` and `reshaped` ones keep the model's fresh initialisation."""

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    reshaped: dict[str, tuple[Shape, Shape]]
    """Tensors of a head that was replaced: their shapes in the file and in the model."""

    def summary(self) -> list[str]:
        """A short table, one line for each thing that happened."""
        replaced = [f"{name} {_change(shapes)}" for name, shapes in self.reshaped.items()]
        rows: tuple[tuple[str, int, list[str]], ...] = (
            ("loaded", len(self.loaded), []),
            ("replaced", len(replaced), replaced),
            ("missing", len(self.missing), self.missing),
            ("unexpected", len(self.unexpected), self.unexpected),
        )
        return [_row(title, count, names) for title, count, names in rows if count or title == "loaded"]


def fit(model: nn.Module, weights: Mapping[str, Tensor], head: Sequence[str] | Literal["auto"] = "auto") -> Fitted:
    """Load weights into the model; a head of other shapes stays fresh, any other difference is an error."""
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    if head == "auto":
        heads = find_heads(model)
    else:
        heads = list(head)
        _check_heads(heads, [*own, *weights])
    fresh = [prefix for prefix in heads if _is_replaced(prefix, own, weights)]

    reshaped: dict[str, tuple[Shape, Shape]] = {}
    problems: list[str] = []
    for name, tensor in own.items():
        shapes = (tuple(weights[name].shape), tuple(tensor.shape)) if name in weights else None
        if shapes and _under(name, fresh):
            reshaped[name] = shapes
        elif shapes and shapes[0] != shapes[1]:
            problems.append(f"{name} {_change(shapes)}")
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    _refuse(
        problems,
        [f"{n} {list(own[n].shape)}" for n in missing if not (_under(n, fresh) or _is_counter(n))],
        [f"{n} {list(weights[n].shape)}" for n in unexpected if not _under(n, fresh)],
    )
    loaded = [name for name in own if name in weights and name not in reshaped]
    model.load_state_dict({name: weights[name] for name in loaded}, strict=False)
    return Fitted(loaded, missing, unexpected, reshaped)


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


def _is_replaced(prefix: str, own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    # A head is one thing: where a part of it cannot be taken over, none of it is.
    shared = [name for name in own if name in weights and _under(name, [prefix])]
    return not shared or any(own[name].shape != weights[name].shape for name in shared)


def _check_heads(heads: list[str], names: Iterable[str]) -> None:
    known = list(names)
    for prefix in heads:
        if not any(_under(name, [prefix]) for name in known):
            raise CheckpointError(f"head {prefix!r}: found in neither the model nor the weights")


def _under(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _is_counter(name: str) -> bool:
    # Files from before PyTorch counted batches lack it, and only averaging without momentum reads it.
    return name.rpartition(".")[2] == "num_batches_tracked"


def _refuse(reshaped: list[str], missing: list[str], unexpected: list[str]) -> None:
    kinds = {
        "of another shape (weights → model)": reshaped,
        "missing from the weights": missing,
        "unknown to the model": unexpected,
    }
    lines = []
    for kind, names in kinds.items():
        if names:
            lines += [f"  {len(names)} {kind}:", *(f"    {name}" for name in names[:_SHOWN])]
            lines += [f"    and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    if lines:
        raise CheckpointError("\n".join(["the weights do not fit the model:", *lines]))


def _change(shapes: tuple[Shape, Shape]) -> str:
    return f"{list(shapes[0])} → {list(shapes[1])}"


def _row(title: str, count: int, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{title:<10} {count:>5} tensors  {shown}".rstrip()
