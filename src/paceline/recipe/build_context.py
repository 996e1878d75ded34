"""What building has to hand: the checked recipe, its names made into objects, and errors that name their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.contracts import is_criterion
from paceline.core.errors import ArgumentError, CheckpointError, DataError, PacelineError, RecipeError
from paceline.core.registry import register
from paceline.core.world import World, is_communication_error
from paceline.recipe.paths import find_path
from paceline.recipe.schema import Part, Recipe
from paceline.recipe.validate import CheckedRecipe


class BuildContext:
    """A checked recipe and the processes it is built for."""

    def __init__(self, checked: CheckedRecipe, world: World) -> None:
        self.checked = checked
        self.recipe: Recipe = checked.recipe
        self.world = world
        self.notes: list[str] = []
        """What was found in building that a user should know."""
        self._found: dict[str, str] = {}

    def make(self, kind: str, name: str, part: Part, **supplied: Any) -> Any:
        """Call what a part names with its arguments, and with those of the supplied ones that it takes."""
        return self.call(kind, name, dict(part.model_extra or {}), **supplied)

    def call(self, kind: str, name: str, arguments: dict[str, Any], **supplied: Any) -> Any:
        """The same for a name and arguments apart."""
        target = resolve(kind, name)
        if kind == "loss" and is_criterion(target):  # a function that is the loss itself
            return partial(target, **arguments)
        accepted = _accepted(target, {name: value for name, value in supplied.items() if name not in arguments})
        return target(**arguments, **accepted)

    def path(self, key: str, written: str) -> Path:
        """A path that the recipe names under `key`, found."""
        found = find_path(written, Path(self.checked.document.values[()].source).parent)
        if _is_utf8(str(found)):  # else it stays as written: a recipe is UTF-8
            self._found[key] = str(found)
        return found

    def resolved(self) -> dict[str, Any]:
        """The recipe with all defaults, and with paths as they were found."""
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
        """Have errors that are raised inside name the recipe's file, line and key."""
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


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """What a valid name stands for."""
    entry = register.kind(kind).find(name)
    assert entry is not None, f"validation let the unknown {kind} {name} through"
    return entry.resolve()


def _accepted(target: Callable[..., Any], supplied: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in supplied.items() if takes_any or name in parameters}


def _is_utf8(path: str) -> bool:
    return not any("\udc80" <= character <= "\udcff" for character in path)
