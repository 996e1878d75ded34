"""The construction of a run's parts as source: what the builder calls, with plain arguments."""

from __future__ import annotations

import importlib
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
from paceline.recipe.schema import Part, Recipe
from paceline.recipe.validate import DEFAULT

_ADAPTERS = {
    "dataset": "data.datasets.torch_dataset.as_dataset",
    "transform": "data.transforms.torchvision_v2.as_transform",
    "loss": "losses.adapter.as_loss",
    "metric": "metrics.adapter.as_metric",
}
"""What puts a user's part behind the contract of its kind."""


class Statements:
    """The statements that build the run of a recipe, which was built on this machine; on assumed data, if it lacks."""

    def __init__(self, recipe: Recipe, builder: SurrogateBuilder, run: Run, imports: Imports) -> None:
        self.recipe, self.builder, self.run, self.imports = recipe, builder, run, imports
        self.body: list[str] = []

    def add(self, code: Code | str, comment: str = "") -> None:
        """Add a statement; its comment goes behind it where there is room, else above it."""
        lines = layout(code if isinstance(code, Code) else Code(code), INDENT)
        if comment and len(lines) == 1 and len(f"{lines[0]}  # {comment}") <= WIDTH:
            lines = [f"{lines[0]}  # {comment}"]
        elif comment:
            lines = [f"{INDENT}# {comment}", *lines]
        self.body += lines

    def set(self, name: str, code: Code, comment: str = "") -> None:
        """Assign an expression to a name."""
        self.add(code.after(f"{name} = "), comment)

    def section(self, comment: str) -> None:
        """Begin a section."""
        self.body += ["", f"{INDENT}# {comment}"]

    def name(self, path: str) -> str:
        """What the file calls something of this package, by its path: `engine.step.train_step`."""
        module, _, name = f"paceline.{path}".rpartition(".")
        return self.imports.name(module, name)

    def call(self, path: str, *items: Code | str, **named: Any) -> Code:
        """A call of this package: expressions by position, values by name unless they are the default."""
        module, _, name = f"paceline.{path}".rpartition(".")
        target = getattr(importlib.import_module(module), name)
        return call(self.imports.name(module, name), *items, **without_defaults(target, named))

    def made(self, part: Any) -> Code:
        """A data class of this package, without what is the default."""
        kind = type(part)
        given = {each.name: getattr(part, each.name) for each in fields(part)}
        return self.call(f"{kind.__module__}.{kind.__name__}".removeprefix("paceline."), **given)

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
        return target, self.imports.name(target.__module__, target.__qualname__, kind), first

    def part(self, key: str, kind: str, part: Part, **known: str) -> Code:
        """A part as the builder makes it, behind the contract of its kind.

        It is given what is `known` by expressions beside a recipe's arguments, as far as it asks for it.
        """
        name: str = getattr(part, "dataset", "") or getattr(part, "name", "")
        target, own, first = self.target(key, kind, name)
        arguments = part.model_extra or {}
        given = {key: each for key, each in arguments.items() if each is not None or key not in known}
        if kind == "loss" and is_criterion(target):
            return self.call(
                _ADAPTERS[kind], value(name), call(self.imports.name("functools", "partial"), own, **given)
            )
        parameters = signature_of(target).parameters
        unset: dict[str, Any] = {key: Code(text) for key, text in known.items() if key not in given}
        more = accepted(target, unset, takes_any=kind not in ("loss", "metric"))
        defaults = {key: repr(parameter.default) for key, parameter in parameters.items()}
        more = {key: code for key, code in more.items() if str(code) != defaults.get(key, "None")}
        named = self.explicit(key, target, given) | more
        named = {key: named[key] for key in [*parameters, *named] if key in named}
        for parameter in list(parameters)[len(first) :]:  # such as model and world
            if str(named.get(parameter)) != parameter:
                break
            first.append(named.pop(parameter))
        made = call(own, *first, **named)
        return made if kind not in _ADAPTERS or is_ours(target) else self.call(_ADAPTERS[kind], value(name), made)

    def explicit(self, key: str, target: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that somebody wrote into the recipe below a key, or that are not what `target` takes anyway."""
        needed, origin = without_defaults(target, given), self.builder.checked.origin
        return {name: each for name, each in given.items() if name in needed or origin(f"{key}.{name}") != DEFAULT}

    def refuse(self, key: str, why: str) -> None:
        """Raise RecipeError for what cannot be written."""
        raise RecipeError(f"{self.builder.checked.locate(key)}: cannot be ejected: {why}")


def variable_of(split: str) -> str:
    """What the variables of a split begin with: val, test_ecssd."""
    return re.sub(r"\W", "_", split)


def without_defaults(target: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are not what a function or class takes anyway."""
    parameters = signature_of(target).parameters
    defaults = {key: repr(_as_lists(parameter.default)) for key, parameter in parameters.items()}
    return {key: each for key, each in given.items() if repr(_as_lists(each)) != defaults.get(key)}


def _as_lists(given: Any) -> Any:
    """The value with tuples as lists: recipes have no tuples."""
    is_sequence = isinstance(given, list | tuple) and not isinstance(given, Code)
    return [_as_lists(each) for each in given] if is_sequence else given
