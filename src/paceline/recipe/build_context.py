"""Shared by builders: the recipe, objects from names, file lookup, errors with their place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from paceline.checkpoint.best import find_checkpoint
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.weights import FoundWeights, find_weights
from paceline.core.agreement import check_same, read_together
from paceline.core.contracts import is_criterion
from paceline.core.errors import ArgumentError, CheckpointError, DataError, PacelineError, RecipeError, UsageError
from paceline.core.registry import register
from paceline.core.signatures import signature_of
from paceline.core.user_code import described, is_ours
from paceline.core.world import World, is_communication_error
from paceline.data.fingerprint import DataFingerprint, differences, fingerprint
from paceline.data.split_loader import SplitLoader
from paceline.engine.state import check_state
from paceline.models.model_errors import is_allocation_error
from paceline.recipe.schema import Part, Recipe
from paceline.recipe.validate import CheckedRecipe


class BuildContext:
    """A checked recipe and the world it is built for."""

    def __init__(self, checked: CheckedRecipe, world: World) -> None:
        self.checked = checked
        self.recipe: Recipe = checked.recipe
        self.world = world
        self.notes: list[str] = []
        """Notes for the user."""
        self._found: dict[str, str] = {}

    def make(self, kind: str, name: str, part: Part, **supplied: Any) -> Any:
        """Create the object of a part from its arguments and those `supplied` that it accepts."""
        return self.call(kind, name, dict(part.model_extra or {}), **supplied)

    def call(self, kind: str, name: str, arguments: dict[str, Any], **supplied: Any) -> Any:
        target = resolve(kind, name)
        if kind == "loss" and is_criterion(target):  # a function that is the loss itself
            return partial(target, **arguments)
        # None of what the data tell too is left to them, such as `num_classes` of torchmetrics.
        arguments = {name: value for name, value in arguments.items() if value is not None or name not in supplied}
        unset = {name: value for name, value in supplied.items() if name not in arguments}
        more = accepted(target, unset, takes_any=kind not in ("loss", "metric"))
        if is_ours(target):
            return target(**arguments, **more)
        try:
            return target(**arguments, **more)
        except (PacelineError, ArgumentError, MemoryError):
            raise
        except Exception as error:
            if is_communication_error(error) or (kind == "model" and is_allocation_error(error)):
                raise  # a model that is too large is explained by its builder
            raise ValueError(f"{described(error)}{_cure(error)}") from error

    def path(self, key: str, written: str) -> Path:
        """The existing path that the recipe gives under `key`."""
        found = find_path(written, Path(self.checked.document.values[()].source).parent)
        if _is_utf8(str(found)):  # else it stays as written: a recipe is UTF-8
            self._found[key] = str(found)
        return found

    def resolved(self) -> dict[str, Any]:
        """The recipe with all defaults and resolved paths."""
        tree = self.checked.resolved()
        for key, path in self._found.items():
            *parents, last = key.split(".")
            place = tree
            for parent in parents:
                place = place[parent]
            place[last] = path
        return tree

    @contextmanager
    def error_context(self, key: str) -> Iterator[None]:
        """Add the recipe's file, line and key to errors raised inside."""
        try:
            yield
        except (DataError, CheckpointError) as error:
            raise type(error)(f"{self.checked.locate(key)}: {error}") from error
        except PacelineError:
            raise
        except ArgumentError as error:
            raise RecipeError(f"{self.checked.locate(f'{key}.{error.argument}')}: {error.reason}") from error
        except (TypeError, ValueError, RuntimeError, ArithmeticError, MemoryError, AssertionError) as error:
            if is_communication_error(error):
                raise
            first_line = str(error).strip().split("\n")[0] or type(error).__name__
            raise RecipeError(f"{self.checked.locate(key)}: {first_line}") from error


def open_together(world: World, run: Path, named: Path | None = None) -> Checkpoint:
    """The checkpoint that `find_checkpoint` finds for rank 0, opened and checked on all ranks."""
    found = read_together(world, lambda: open_checkpoint(find_checkpoint(run, named)), open_checkpoint)
    assert found is not None
    check_state(found)
    return found


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """The object behind a valid name."""
    entry = register.kind(kind).find(name)
    assert entry is not None, f"validation accepted the unknown {kind} {name}"
    return entry.resolve()


def accepted(target: Callable[..., Any], supplied: dict[str, Any], takes_any: bool) -> dict[str, Any]:
    """What is supplied and named by the signature; with `takes_any`, all of it where there are `**kwargs`."""
    parameters = signature_of(target).parameters
    # A module without an __init__ of its own has torch's, which takes any arguments and then refuses them.
    is_inherited = isinstance(target, type) and vars(nn.Module)["__init__"] is getattr(target, "__init__", None)
    takes_any = takes_any and not is_inherited and any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in supplied.items() if takes_any or name in parameters}


def _cure(error: Exception) -> str:
    return "; call super().__init__() first" if "before Module.__init__() call" in str(error) else ""


def _is_utf8(path: str) -> bool:
    return not any("\udc80" <= character <= "\udcff" for character in path)


DATA_VARIABLE = "PACELINE_DATA"


def find_path(written: str, recipe_folder: Path) -> Path:
    """Find a file or folder: absolute, or relative to one of these, in this order.

    The current folder, its `data/`, the folder of the recipe, and PACELINE_DATA.
    """
    path = Path(written).expanduser()
    places = [path] if path.is_absolute() else list(dict.fromkeys(place / path for place in _places(recipe_folder)))
    for place in places:
        if place.exists():
            return place.resolve()
    missing = "".join(f", nor does {place}" for place in places[1:])
    hint = "" if path.is_absolute() else f"; give another path, or set {DATA_VARIABLE} to the folder that holds it"
    raise DataError(f"{places[0]} does not exist{missing}{hint}")


def _places(recipe_folder: Path) -> list[Path]:
    named = os.environ.get(DATA_VARIABLE)
    return [Path(), Path("data"), recipe_folder, *([Path(named)] if named else [])]


_CHANGED = "it changed while the processes started; run the command again"


def check_recipe(context: BuildContext) -> None:
    """Raise if ranks read different recipes."""
    own = context.checked.resolved()
    own["use"] = [each["sha256"] for each in own["use"] if isinstance(each, dict)]  # on machines with other folders

    def explain(first: Any) -> str:
        key, theirs, ours = _first_difference("", first, own)
        return f"{context.checked.locate(key)}: found {ours!r}, but rank 0 found {theirs!r}: {_CHANGED}"

    check_same(context.world, own, explain, UsageError)


def check_data(context: BuildContext, loaders: Mapping[str, SplitLoader]) -> None:
    """Raise if ranks found different samples, by name and order."""
    if context.world.size == 1:
        return
    own = {split: fingerprint(loader.dataset, with_sizes=False) for split, loader in loaders.items()}

    def explain(first: Any) -> str:
        found = differences({split: DataFingerprint.from_json(each) for split, each in first.items()}, own)
        return f"{context.checked.locate('data')}: differs from what rank 0 found: {'; '.join(found)}: {_CHANGED}"

    check_same(context.world, {split: each.to_json() for split, each in own.items()}, explain, DataError)


def read_weights_together(
    context: BuildContext, locate: Callable[[], Path | str], key: str | None = None
) -> FoundWeights:
    """Weights of any origin, see `find_weights`; rank 0 selects the checkpoint of a run.

    `locate` returns the file, run or name; it is called again if that has disappeared.
    """
    found = read_together(
        context.world,
        lambda: find_weights(locate(), key),
        lambda chosen: find_weights(chosen if chosen.is_dir() else locate(), key),
    )
    assert found is not None
    return found


def _first_difference(key: str, first: Any, own: Any) -> tuple[str, Any, Any]:
    """The first key at which two trees differ, and both values."""
    if isinstance(first, dict) and isinstance(own, dict):
        for name in [*first, *own]:
            if first.get(name) != own.get(name):
                return _first_difference(f"{key}.{name}" if key else name, first.get(name), own.get(name))
    return key, first, own
