"""Names that recipes may use, what they stand for, and which arguments they take.

An entry knows its arguments without importing what it names, so a recipe is checked before torch is loaded.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, create_model
from pydantic.fields import FieldInfo

from paceline.core.arguments import Arguments

T = TypeVar("T", bound=Callable[..., Any])


class NoArguments(Arguments):
    """Takes nothing beyond its name."""


@dataclass(frozen=True)
class Entry:
    """One name: `target` is the object itself or "module:attribute", imported by `resolve`."""

    name: str
    target: Callable[..., Any] | str
    arguments: type[Arguments]
    summary: str
    member: str | None = None

    def resolve(self) -> Callable[..., Any]:
        """Import what the name stands for; a family's maker comes with its member's name filled in."""
        if not isinstance(self.target, str):
            return self.target
        module, attribute = self.target.split(":")
        resolved: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return resolved if self.member is None else partial(resolved, self.member)


@dataclass(frozen=True)
class Family:
    """Names of another library under a prefix (`timm/`), from a table that ships with the package."""

    prefix: str
    target: str
    arguments: type[Arguments]
    summary: str
    members: Callable[[], list[str]]
    is_open: Callable[[], bool]
    """Whether names outside the table may exist too: another version of the library than the table's is installed."""

    def find(self, name: str) -> Entry | None:
        """The entry of a full name (prefix included) if the library has it, or may have it."""
        member = name.removeprefix(self.prefix)
        architecture = member.partition(".")[0]  # timm writes a tag of weights behind a dot
        if member == name or not (architecture in self.members() or self.is_open()):
            return None
        return Entry(name, self.target, self.arguments, self.summary, member)


class Registry:
    """The names of one kind: models, losses, data sets and so on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.families: list[Family] = []
        self._entries: dict[str, Entry] = {}

    def add(
        self,
        name: str,
        target: Callable[..., Any] | str,
        arguments: type[Arguments] = NoArguments,
        summary: str = "",
    ) -> None:
        """Make `name` valid in recipes; a name is given once."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already, as {self._entries[name].target}")
        self._entries[name] = Entry(name, target, arguments, summary)

    def find(self, name: str) -> Entry | None:
        """The entry of that name, or None."""
        found = (family.find(name) for family in self.families)
        return self._entries.get(name) or next((entry for entry in found if entry), None)

    def names(self) -> list[str]:
        """All names: the registered ones in the order in which they were added, then those of the families."""
        families = [family.prefix + member for family in self.families for member in family.members()]
        return [*self._entries, *families]

    def __iter__(self) -> Iterator[Entry]:
        """The registered entries, families left out."""
        return iter(self._entries.values())


class _AnyArguments(Arguments):
    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


# What the builder gives to a component, not the recipe: left out of the arguments read off a signature.
_SUPPLIED = {
    "model": {"num_classes", "in_channels"},
    "loss": {"num_classes", "ignore_index"},
    "metric": {"num_classes", "classes", "ignore_index"},
    "optimizer": {"params", "lr", "weight_decay"},
    "schedule": {"span", "done", "step", "epoch", "total_steps", "total_epochs"},
    "layer_map": {"model"},
    "transform": {"num_classes", "pairs"},
    "task": {"losses", "weights", "classes", "extra_metrics", "ignore_index"},
}


def arguments_of(target: Callable[..., Any], kind: str = "") -> type[Arguments]:
    """Read the arguments of a user's class or function off its signature; unannotated ones take anything."""
    supplied = {"self"} | _SUPPLIED.get(kind, set())
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in supplied:
            continue
        default = FieldInfo() if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, Any), default)
    return create_model(f"{target.__name__}Arguments", __base__=_AnyArguments, **fields)


class Register:
    """The decorators with which a user's module adds names: `@register.model("mine")` and so on."""

    def __init__(self) -> None:
        self.kinds: dict[str, Registry] = {}

    def kind(self, name: str) -> Registry:
        """The registry of one kind; made on first use."""
        return self.kinds.setdefault(name, Registry(name))

    def __getattr__(self, kind: str) -> Callable[[str], Callable[[T], T]]:
        if kind.startswith("_") or kind not in KINDS:
            raise AttributeError(f"there is no register.{kind}; there are {', '.join(KINDS)}")

        def named(name: str) -> Callable[[T], T]:
            def decorate(target: T) -> T:
                summary = (inspect.getdoc(target) or "").split("\n")[0]
                self.kind(kind).add(name, target, arguments_of(target, kind), summary)
                return target

            return decorate

        return named


KINDS = ("model", "dataset", "transform", "loss", "optimizer", "schedule", "layer_map", "metric", "task")
register = Register()
