"""The optimizers of torch and timm with their arguments, from a table that ships with the package.

So a recipe is checked without loading either library.

`python -m paceline.optim.third_party` writes the table anew from the installed versions.
"""

from __future__ import annotations

import inspect
import json
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ConfigDict, Field, create_model

from paceline.core.arguments import Arguments
from paceline.core.registry import Entry, Family

TABLE = Path(__file__).with_name("names.json")

LEFT_OUT = {
    "torch": {
        "lbfgs": "evaluates the loss several times within one update",
        "sparseadam": "works on sparse gradients only",
        "muon": "works on matrices only; `muon` here is timm's, which gives the rest to AdamW",
    },
    "timm": {
        "adahessian": "needs second derivatives",
        "kron": "draws from a random generator of its own, which a checkpoint cannot hold",
        "kronc": "as kron",
        "kronw": "as kron",
        "radamlegacy": "takes the learning rate of one group for the others; `radam` does not",
    },
}
"""Why some have no name here. What timm only passes on to other packages (bnb…, fused…) is left out too."""

# Given by the recipe's own keys, chosen by `make_optimizer`, or without use in training.
_HIDDEN = {
    *("params", "lr", "weight_decay"),
    *("foreach", "fused", "capturable", "differentiable"),
    *("maximize", "verbose", "adamw_lr"),
}
_MOMENTUM = 0.9  # what timm gives to all that take momentum, whatever their own default
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "list": list[float], "null": None}


class UnlistedArguments(Arguments):
    """Arguments of what the table does not know; the library itself judges them."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class TabledFamily(Family):
    """A library's optimizers under a prefix, each with arguments of its own."""

    def find(self, name: str) -> Entry | None:
        """The entry of a full name; `arguments` of the family only describes all of its members together."""
        library, _, member = name.partition("/")
        if library + "/" != self.prefix or not member:
            return None
        if member in _members(library):
            return Entry(name, self.target, tabled_arguments(library, member), self.summary, member)
        return Entry(name, self.target, UnlistedArguments, self.summary, member) if self.is_open() else None


def members_of(library: str) -> Callable[[], list[str]]:
    """A function that gives the library's optimizer names."""
    return lambda: list(_members(library))


def other_version_of(library: str) -> Callable[[], bool]:
    """A function that tells whether another version than the table's is installed, whose names may differ."""
    return lambda: _installed(library) != _table()[library]["version"]


@cache
def tabled_arguments(library: str, member: str) -> type[Arguments]:
    """The arguments of one optimizer."""
    listed = _members(library)[member].items()
    fields: dict[str, Any] = {name: (_type(words, default), default) for name, (words, default) in listed}
    return create_model(f"{library.title()}{member.title()}Arguments", __base__=Arguments, **fields)


def any_arguments(library: str) -> type[Arguments]:
    """All arguments that any optimizer of the library takes, unchecked."""
    names = sorted({name for member in _members(library).values() for name in member})
    fields: dict[str, Any] = dict.fromkeys(names, (Any, None))
    return create_model(f"{library.title()}OptimizerArguments", __base__=Arguments, **fields)


def timm_defaults(info: Any) -> dict[str, Any]:
    """What timm gives an optimizer under one of its names, from timm's description of it."""
    momentum = {"momentum": _MOMENTUM} if info.has_momentum else {}
    return momentum | (info.defaults or {})


def collect() -> dict[str, Any]:
    """The table as the installed libraries give it."""
    return {
        library: {"version": _installed(library), "names": dict(sorted(found.items()))}
        for library, found in (("torch", _collect_torch()), ("timm", _collect_timm()))
    }


def _collect_torch() -> dict[str, Any]:
    import torch

    classes = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__}
    optimizers = {
        name: each
        for name, each in classes.items()
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    return {name: _signature(each, {}) for name, each in optimizers.items() if name not in LEFT_OUT["torch"]}


def _collect_timm() -> dict[str, Any]:
    from paceline.models.torchvision_ops import import_torchvision

    import_torchvision()  # timm imports it, so it must come in through our door
    from timm.optim import get_optimizer_info, list_optimizers

    found = {}
    for name in list_optimizers():
        info = get_optimizer_info(name)
        if isinstance(info.opt_class, str) or name in LEFT_OUT["timm"]:
            continue
        found[name] = _signature(info.opt_class, timm_defaults(info))
    return found


def _signature(optimizer: Callable[..., Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Each argument with the words for its type and its default, as JSON can hold them."""
    arguments = {}
    for name, parameter in inspect.signature(optimizer, eval_str=True).parameters.items():
        if name not in _HIDDEN:
            default = defaults.get(name, parameter.default)
            words = _words(parameter.annotation, default)
            arguments[name] = ["|".join(sorted(words)), _plain(default)]
    return arguments


def _words(annotation: Any, default: Any) -> set[str]:
    if annotation is inspect.Parameter.empty:
        # Without annotations, 0 stands for a number: `momentum=0`.
        return {"float" if type(default) is int else _word(type(default))}
    is_union = get_origin(annotation) in (Union, types.UnionType)
    words = {_word(each) for each in (get_args(annotation) if is_union else [annotation])} & set(_TYPES)
    return words - {"int"} if "float" in words else words


def _word(annotation: Any) -> str:
    kind = get_origin(annotation) or annotation
    named = {bool: "bool", int: "int", float: "float", str: "str", tuple: "list", list: "list", type(None): "null"}
    return named.get(kind, "other")


def _plain(default: Any) -> Any:
    if default is None or isinstance(default, bool | int | float | str):
        return default
    return list(default) if isinstance(default, tuple | list) else str(default).removeprefix("torch.")  # a dtype


def _type(words: str, default: Any) -> Any:
    kinds = {word: _TYPES[word] for word in words.split("|")}
    if isinstance(default, list):
        item: Any = float | None if None in default else float
        kinds["list"] = Annotated[list[item], Field(min_length=len(default), max_length=len(default))]
    return reduce(operator.or_, kinds.values())


def _members(library: str) -> dict[str, Any]:
    names: dict[str, Any] = _table()[library]["names"]
    return names


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def _installed(library: str) -> str:
    return metadata.version(library).partition("+")[0]


def _written(table: dict[str, Any]) -> str:
    """The table with a line for each optimizer."""
    libraries = []
    for library, part in table.items():
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in part["names"].items())
        libraries.append(f'"{library}": {{\n"version": "{part["version"]}",\n"names": {{\n{lines}\n}}\n}}')
    return "{\n" + ",\n".join(libraries) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(_written(collect()), encoding="utf-8")
