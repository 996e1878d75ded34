"""The registry: names that recipes may use, their targets and their arguments.

A decorator gives a class or function its name: `@register.loss("mine")`; arguments, defaults and bounds are read off
the signature. Those of this package are known from a table, `registry.json`, before anything is imported, so that a
recipe is checked without torch; `make table` writes it.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import ConfigDict

from paceline.core.arguments import ArgumentCheck, Arguments, ArgumentsCheck
from paceline.core.contracts import check_contract, registration_place, supplied_to_loss
from paceline.core.signatures import arguments_of, from_json, signature_of, to_json

T = TypeVar("T", bound=Callable[..., Any])
Row = dict[str, Any]
"""What the table knows of a name: its "target", "summary", "arguments" and "checks"; of a family "library" too."""

TABLE = Path(__file__).parent.parent / "registry.json"

# What the builder gives to a component, not the recipe: left out of the arguments read off a signature.
SUPPLIED = {
    "model": {"num_classes", "in_channels", "num_keypoints"},
    "loss": {"num_classes", "ignore_index"},
    "metric": {"num_classes", "classes", "ignore_index", "joints"},
    "optimizer": {"params", "lr", "weight_decay"},
    "schedule": {"span", "done", "step", "epoch", "total_steps", "total_epochs"},
    "layer_map": {"model"},
    "transform": {"num_classes", "pairs"},
    "task": {"losses", "weights", "model", "classes", "joints", "extra_metrics", "ignore_index"},
    "averaging": {"total_steps", "steps_per_epoch"},
    "strategy": {"model", "world", "is_exact"},
}
FILLED_IN = {"num_classes", "ignore_index"}
"""What the builder gives to a user's metric unless the recipe does: torchmetrics' classes name them."""
KINDS = (
    "model", "dataset", "transform", "loss", "optimizer", "schedule", "layer_map", "metric", "task",
    "averaging", "activation_checkpointing", "strategy",
)  # fmt: skip


class UnlistedArguments(Arguments):
    """Arguments of what the table does not know; the library itself judges them."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Entry:
    """One name: `target` is the object itself or "module:attribute", imported by `resolve`."""

    name: str
    target: Callable[..., Any] | str
    summary: str
    read_arguments: Callable[[], type[Arguments]]
    member: str | None = None
    takes_losses: bool = False
    """Whether a task is given the recipe's losses; one that is not brings its own."""

    @cached_property
    def arguments(self) -> type[Arguments]:
        return self.read_arguments()

    def resolve(self) -> Callable[..., Any]:
        """Import what the name stands for; a family's maker comes with its member's name filled in."""
        resolved = self.target
        if isinstance(resolved, str):
            module, attribute = resolved.split(":")
            resolved = getattr(importlib.import_module(module), attribute)
        return resolved if self.member is None else partial(resolved, self.member)


@dataclass(frozen=True)
class Library:
    """Another library whose names follow a prefix: `@register.model("timm/", library=Library("timm", list_models))`.

    The function gives the names, or a mapping from names to the JSON Schemas of their arguments. It is called when the
    table is written; with another version of the library installed than then, names outside the table may exist too.
    """

    distribution: str
    members: Callable[[], Sequence[str] | Mapping[str, Any]]


class Family:
    """The names under a prefix such as `timm/`, as the table has them."""

    def __init__(self, prefix: str, row: Row) -> None:
        self.prefix = prefix
        self.summary: str = row["summary"]
        self.target: Callable[..., Any] | str = row["target"]
        self._row = row
        self._members: Sequence[str] | Mapping[str, Any] = row["library"]["members"]
        self._read_member = cache(self._arguments_of_member)

    def names(self) -> list[str]:
        return [self.prefix + member for member in self._members]

    def find(self, name: str) -> Entry | None:
        """The entry of a full name (prefix included) if the library has it, or may have it."""
        member = name.removeprefix(self.prefix)
        architecture = member.partition(".")[0]  # timm writes a tag of weights behind a dot
        if member in ("", name) or not (architecture in self._members or self._is_open()):
            return None
        return Entry(name, self.target, self.summary, partial(self._read_member, architecture), member)

    @cached_property
    def arguments(self) -> type[Arguments]:
        """The arguments of all members; where each has its own, all that any of them takes, unchecked."""
        nodes = self._row["arguments"]
        if isinstance(self._members, Mapping):
            names = {name for taken in self._members.values() for name in taken}
            nodes = {name: {"default": None} for name in sorted(names)}
        return from_json(self.prefix, nodes, self._row.get("checks", ()))

    def _arguments_of_member(self, member: str) -> type[Arguments]:
        if not isinstance(self._members, Mapping):
            return self.arguments
        taken = self._members.get(member)
        return UnlistedArguments if taken is None else from_json(self.prefix + member, taken)

    def _is_open(self) -> bool:
        library = self._row["library"]
        try:
            return installed_version(library["distribution"]) != str(library["version"])
        except metadata.PackageNotFoundError:  # of an extra
            return False


def installed_version(distribution: str) -> str:
    """The version of an installed library, without a tag such as `+cpu`."""
    return metadata.version(distribution).partition("+")[0]


def _address(target: Callable[..., Any] | str) -> str:
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


@dataclass(frozen=True)
class Definition:
    """A name as a decorator gives it."""

    kind: str
    name: str
    target: Callable[..., Any]
    checks: Sequence[ArgumentsCheck] = ()
    library: Library | None = None

    @property
    def address(self) -> str:
        """Where the target is defined: "module:attribute"."""
        return _address(self.target)

    @property
    def is_ours(self) -> bool:
        """Whether the target belongs to this package, so that the table has it."""
        return self.target.__module__.startswith("paceline.")

    def entry(self) -> Entry:
        """Its entry, whose arguments are those of the signature that a recipe gives."""
        summary = (inspect.getdoc(self.target) or "").split("\n")[0]
        parameters = signature_of(self.target).parameters if self.kind == "task" else {}
        takes_losses = "losses" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return Entry(self.name, self.target, summary, self._arguments, takes_losses=takes_losses)

    def _arguments(self) -> type[Arguments]:
        supplied = SUPPLIED.get(self.kind, set()) | ({"name"} if self.library else set())
        if self.kind == "loss" and not self.is_ours:
            supplied = supplied_to_loss(self.target, supplied)
        filled_in = FILLED_IN if self.kind == "metric" and not self.is_ours else set()
        return arguments_of(self.target, supplied - filled_in, self.checks, filled_in)

    def row(self) -> Row:
        entry = self.entry()
        row: Row = {"target": self.address, "summary": entry.summary, "arguments": to_json(entry.arguments)}
        if entry.takes_losses:
            row["takes_losses"] = True
        if self.checks:
            row["checks"] = [check.row() for check in self.checks]
        if self.library:
            distribution, members = self.library.distribution, self.library.members()
            version = installed_version(distribution)
            row["library"] = {"distribution": distribution, "version": version, "members": members}
        return row


class Registry:
    """The names of one kind: models, losses, data sets and so on."""

    def __init__(self, kind: str, rows: Mapping[str, Row] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}
        self._families: dict[str, Family] = {}
        for name, row in (rows or {}).items():
            if "library" in row:
                self._families[name] = Family(name, row)
            else:
                read = partial(from_json, f"{kind} {name}", row["arguments"], row.get("checks", ()))
                self._entries[name] = Entry(name, row["target"], row["summary"], read, None, "takes_losses" in row)

    def add(self, definition: Definition) -> None:
        """Make a name valid in recipes; the same part, defined again, takes its place. What the table says stays."""
        name = definition.name
        known = self._entries.get(name) or self._families.get(name)
        if known is not None and known.target == definition.address:
            return
        is_again = isinstance(known, Entry) and _address(known.target) == definition.address  # in a notebook, say
        if known is not None and not is_again and not definition.is_ours:  # if ours, the table is old
            raise ValueError(f"{self.kind} {name!r} is registered already, as {_address(known.target)}")
        if definition.library:
            self._families[name] = Family(name, definition.row() | {"target": definition.target})
        else:
            entry = definition.entry()
            _ = entry.arguments  # a signature that cannot be read is refused here
            self._entries[name] = entry

    @property
    def families(self) -> list[Family]:
        return list(self._families.values())

    def find(self, name: str) -> Entry | None:
        by_length = sorted(self.families, key=lambda family: -len(family.prefix))  # `lib/part/` before `lib/`
        found = (family.find(name) for family in by_length)
        return self._entries.get(name) or next((entry for entry in found if entry), None)

    def names(self) -> list[str]:
        """All names: those of the table, then those added, then those of the families."""
        return [*self._entries, *(name for family in self.families for name in family.names())]

    def own_names(self) -> list[str]:
        added = [each for each in self if not isinstance(each.target, str)]
        return [each.name for each in added if not _address(each.target).startswith("paceline.")]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())


class _Named(Protocol):
    def __call__(
        self, name: str, *, checks: Sequence[ArgumentsCheck] = (), library: Library | None = None
    ) -> Callable[[T], T]: ...


class Register:
    """The decorators that give names: `@register.model("mine")` and so on."""

    def __init__(self, table: Callable[[], Mapping[str, Mapping[str, Row]]] = dict) -> None:
        self.kinds: dict[str, Registry] = {}
        self.definitions: dict[tuple[str, str], Definition] = {}
        """What decorators of this package have named so far, for the table."""
        self._table = table

    def kind(self, name: str) -> Registry:
        """The registry of one kind; made on first use."""
        if name not in self.kinds:
            self.kinds[name] = Registry(name, self._table().get(name))
        return self.kinds[name]

    def _remember(self, definition: Definition) -> None:
        known = self.definitions.setdefault((definition.kind, definition.name), definition)
        if known.address != definition.address:
            found = f"is defined by {known.address} and by {definition.address}"
            raise ValueError(f"{definition.kind} {definition.name!r} {found}")

    def __getattr__(self, kind: str) -> _Named:
        if kind.startswith("_") or kind not in KINDS:
            raise AttributeError(f"there is no register.{kind}; there are {', '.join(KINDS)}")

        def named(
            name: Any, *, checks: Sequence[ArgumentsCheck] = (), library: Library | None = None
        ) -> Callable[[T], T]:
            if not isinstance(name, str):
                function = getattr(name, "__name__", "name")
                with registration_place(kind, function):
                    raise TypeError(f'the name is missing; write `@register.{kind}("{function}")`')

            def decorate(target: T) -> T:
                definition = Definition(kind, name, target, checks, library)
                with registration_place(kind, name):
                    if not definition.is_ours:
                        check_contract(kind, target)
                    self.kind(kind).add(definition)
                if definition.is_ours:
                    self._remember(definition)
                return target

            return decorate

        return named


@cache
def _shipped() -> dict[str, dict[str, Row]]:
    table: dict[str, dict[str, Row]] = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    return table


register = Register(_shipped)


class NameOf(ArgumentCheck):
    """A registered name: `NameOf("model", "timm/", "torchvision/")` is one of these libraries' models."""

    def problem(self, value: str) -> str | None:
        kind, *prefixes = self.words
        library = value.partition("/")[0] + "/"
        if library not in prefixes:
            return f"expected {' or '.join(f'{prefix}NAME' for prefix in prefixes)}, got {value!r}"
        family = next(each for each in register.kind(kind).families if each.prefix == library)
        if family.find(value):
            return None
        near = ", ".join(get_close_matches(value, family.names(), n=3))
        return f"there is no {kind} {value!r}" + (f"; there is {near}" if near else "")
