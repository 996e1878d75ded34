"""`paceline.Recipe`: a recipe that is written in Python, or read from a file, and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import PrivateAttr

from paceline.core.errors import UsageError
from paceline.recipe import schema
from paceline.recipe.document import MAX_DEPTH, KeyPath, Origin, document_of
from paceline.recipe.load import extended, override
from paceline.recipe.problems import Problem
from paceline.recipe.user_modules import check_document, read_checked
from paceline.recipe.validate import CheckedRecipe, recipe_error

_VALUES = "strings, numbers, true, false, None, lists and mappings of these, a Path or a NumPy number"

if TYPE_CHECKING:
    Given = Mapping[str, Any]
    """A section as a mapping, with the keys of a recipe file."""


class Recipe(schema.Recipe):
    """A whole recipe, checked when it is made; all mistakes are raised at once.

    Sections are those of `paceline.recipe.schema`, or mappings; a part may be just its name, as in a file.
    """

    _checked: CheckedRecipe = PrivateAttr()

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            name: str = ...,
            task: schema.TaskPart | Given | str = ...,
            model: schema.ModelPart | Given | str = ...,
            data: schema.Data | Given = ...,
            losses: Sequence[schema.LossPart | Given | str] = ...,
            optimizer: schema.OptimizerPart | Given = ...,
            schedule: schema.SchedulePart | Given | str = ...,
            train: schema.Train | Given = ...,
            evaluate: schema.Evaluate | Given = ...,
            checkpoint: schema.Checkpoint | Given = ...,
            logging: schema.Logging | Given = ...,
            expect: Mapping[str, float] = ...,
            use: str | Sequence[str] = ...,
            extends: str | Sequence[str] = ...,
        ) -> None: ...

    else:

        def __init__(self, **sections: Any) -> None:
            problems: list[Problem] = []
            document = document_of(_plain(sections, (), problems), Origin("Recipe"))
            if problems:
                raise recipe_error(problems, document)
            self._hold(check_document(extended(document, "Recipe")))

    @classmethod
    def load(cls, reference: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """The recipe of a file, or one that ships."""
        recipe = cls.__new__(cls)
        recipe._hold(read_checked(str(reference), as_overrides(overrides)))
        return recipe

    def checked(self, overrides: Sequence[str] = ()) -> CheckedRecipe:
        """What a run is built from, with overrides as on the command line."""
        if self.model_dump() != self._checked.recipe.model_dump():
            raise UsageError('this Recipe is a changed copy, unchecked; give changes as overrides: {"train.epochs": 3}')
        return check_document(override(self._checked.document, overrides)) if overrides else self._checked

    def _hold(self, checked: CheckedRecipe) -> None:
        self.__setstate__(checked.recipe.__getstate__() | {"__pydantic_private__": {"_checked": checked}})


def as_overrides(values: Mapping[str, Any] | None) -> list[str]:
    """Python values by dotted key as overrides of the command line; UsageError for what a recipe cannot hold."""
    problems: list[Problem] = []
    written = [f"{key}={json.dumps(_plain(value, (key,), problems))}" for key, value in (values or {}).items()]
    if problems:
        raise UsageError("\n".join(f"{problem.path[0]}: {problem.message}" for problem in problems))
    return written


def _plain(value: Any, path: KeyPath, problems: list[Problem]) -> Any:
    """The value as a file would hold it."""
    if isinstance(value, schema.Section):
        value = value.given()
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif type(value).__module__ == "numpy" and value.ndim == 0:
        value = value.item()
    if len(path) > MAX_DEPTH:
        found = f"nested more than {MAX_DEPTH} deep"
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    elif isinstance(value, list | tuple):
        return [_plain(inner, (*path, index), problems) for index, inner in enumerate(value)]
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(inner, (*path, key), problems) for key, inner in value.items()}
    else:
        kinds = [type(key).__name__ for key in value if not isinstance(key, str)] if isinstance(value, Mapping) else []
        found = f"a key of type {kinds[0]}" if kinds else type(value).__name__
        found = f"expected {_VALUES}, got {found}; convert it first, an array with tolist()"
    problems.append(Problem(path, found))
    return None
