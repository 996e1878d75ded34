"""The construction of a run's parts as source: what the builder calls, with plain arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from paceline.commands.python_source import INDENT, WIDTH, Code, Imports, call, layout, value
from paceline.core.contracts import is_criterion
from paceline.core.errors import RecipeError
from paceline.core.registry import register
from paceline.core.signatures import signature_of
from paceline.core.user_code import is_ours
from paceline.engine.run import Run
from paceline.plan.surrogate import SurrogateBuilder
from paceline.recipe.build_context import accepted
from paceline.recipe.validate import CheckedRecipe


class Always:
    """The value of an argument that is written whatever the default is."""


Supplied = Mapping[str, tuple[str, Any]]
"""What a part is given beside the recipe's arguments, if it asks for it: an expression, and its value in this run."""
_ADAPTERS = {
    "dataset": "data.datasets.torch_dataset",
    "transform": "data.transforms.torchvision_v2",
    "loss": "losses.adapter",
    "metric": "metrics.adapter",
}
"""The modules that put a user's part behind the contract of its kind, by `as_dataset` and so on."""


class PartWriter:
    """Writes the construction of parts; a name that a part is called by is imported."""

    def __init__(self, checked: CheckedRecipe, imports: Imports) -> None:
        self._checked, self._imports = checked, imports

    def name(self, module: str, name: str, known: str = "") -> str:
        """What the file calls a name of this package; `known` if the name itself would say too little there."""
        return self._imports.name(f"paceline.{module}", name, known)

    def call(self, path: str, *items: Code | str, **named: Code | str) -> Code:
        """A call of this package, by its path: `optim.clipping.NoClip`."""
        module, _, name = path.rpartition(".")
        return call(self.name(module, name), *items, **named)

    def target(self, key: str, kind: str, name: str) -> tuple[Any, str, list[Code]]:
        """What a name of a recipe stands for, what the file calls it, and the arguments that come first.

        A library's name is the first argument of the function that makes its parts.
        """
        entry = register.kind(kind).find(name)
        assert entry is not None, f"validation accepted the unknown {kind} {name}"
        found: Any = entry.resolve()
        target, first = (found.func, [value(entry.member)]) if isinstance(found, partial) else (found, [])
        if target.__module__ == "__main__" or not target.__qualname__.isidentifier():
            self.refuse(key, f"{target.__qualname__} cannot be imported; define it at the top of a module")
        return target, self._imports.name(target.__module__, target.__qualname__, kind=kind), first

    def part(self, key: str, kind: str, name: str, arguments: Mapping[str, Any] | None, supplied: Supplied) -> Code:
        """A part as the builder makes it, behind the contract of its kind; defaults are left out."""
        target, own, first = self.target(key, kind, name)
        given = {key: each for key, each in (arguments or {}).items() if each is not None or key not in supplied}
        if kind == "loss" and is_criterion(target):
            made = call("partial", own, **{key: value(each) for key, each in given.items()})
            return self.call(f"{_ADAPTERS[kind]}.as_loss", value(name), made)
        unset = {key: each for key, each in supplied.items() if key not in given}
        more = accepted(target, unset, takes_any=kind not in ("loss", "metric"))
        parameters = signature_of(target).parameters
        named = without_defaults(target, given)
        for key, (text, now) in more.items():
            if not _is_default(now, parameters.get(key)) and not (now is None and key not in parameters):
                named[key] = Code(text)
        named = {key: named[key] for key in [*parameters, *named] if key in named}
        for parameter in list(parameters)[len(first) :]:  # such as model and world
            if str(named.get(parameter)) != parameter:
                break
            first.append(named.pop(parameter))
        made = call(own, *first, **named)
        if kind not in _ADAPTERS or is_ours(target):
            return made
        return self.call(f"{_ADAPTERS[kind]}.as_{kind}", value(name), made)

    def dataclass(self, made: Any) -> Code:
        """A data class of this package, without what is the default."""
        kind = type(made)
        given = {each.name: getattr(made, each.name) for each in fields(made)}
        return call(self._imports.name(kind.__module__, kind.__name__), **without_defaults(kind, given))

    def refuse(self, key: str, why: str) -> None:
        """Raise RecipeError for what cannot be written."""
        raise RecipeError(f"{self._checked.locate(key)}: cannot be ejected: {why}")


class Statements:
    """The statements that build a run, which was built on this machine; where data is missing, on assumed data."""

    def __init__(self, builder: SurrogateBuilder, run: Run, imports: Imports) -> None:
        self.builder, self.run, self.recipe, self.imports = builder, run, builder.recipe, imports
        self.write = PartWriter(builder.checked, imports)
        self.body: list[str] = []

    def add(self, code: Code | str, comment: str = "", to: str = "") -> None:
        """Add a statement, or assign `to` a name; its comment goes behind it where there is room, else above it."""
        statement = code if isinstance(code, Code) else Code(code)
        lines = layout(statement.after(f"{to} = ") if to else statement, INDENT)
        if comment and len(lines) == 1 and len(f"{lines[0]}  # {comment}") <= WIDTH:
            lines = [f"{lines[0]}  # {comment}"]
        elif comment:
            lines = [f"{INDENT}# {comment}", *lines]
        self.body += lines

    def section(self, comment: str) -> None:
        """Begin a section."""
        self.body += ["", f"{INDENT}# {comment}"]


def without_defaults(target: Any, given: Mapping[str, Any]) -> dict[str, Code]:
    """The arguments that are not what a function or class takes anyway."""
    parameters = signature_of(target).parameters
    return {key: value(each) for key, each in given.items() if not _is_default(each, parameters.get(key))}


def _is_default(given: Any, parameter: inspect.Parameter | None) -> bool:
    if parameter is None or given is Always:
        return False
    return repr(_as_lists(given)) == repr(_as_lists(parameter.default))


def _as_lists(given: Any) -> Any:
    """The value with tuples as lists: recipes have no tuples."""
    return [_as_lists(each) for each in given] if isinstance(given, list | tuple) else given


def variable_of(split: str) -> str:
    """What the variables of a split begin with: val, test_ecssd."""
    return re.sub(r"\W", "_", split)
