"""Arguments described without torch: their base class, number types, and checks that a type cannot express.

Checks are data: the registry's table names them.

One argument:           `milestones: Annotated[Sequence[int], Increasing()]`
Several of a signature: `@register.transform("pad", checks=[ExactlyOneOf("size", "multiple")])`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Arguments(BaseModel):
    """Arguments of something a recipe names: typed, strict, unknown ones refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
"""What a loss is multiplied by: float32 ends at 3e38, and the product has to fit."""
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""A number from 0 to 1, both included."""
PositiveShare = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""A number from 0, not included, to 1."""
PartialShare = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""A number from 0 up to, but not including, 1."""
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]


Row = list[str]
"""A check in the table: its class's name and what it was made with."""


class Check:
    """Made with words only, so that the table can hold it."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def row(self) -> Row:
        """The check as JSON; `check_of` reads it."""
        return [type(self).__name__, *self.words]


class ArgumentCheck(Check):
    """A check of one argument's value; stands in `Annotated`."""

    def problem(self, value: Any) -> str | None:
        """What is wrong with the value; None if nothing is."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def checked(value: Any) -> Any:
            if problem := self.problem(value):
                raise ValueError(problem)
            return value

        return core_schema.no_info_after_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        node = handler(schema)
        return node | {"checks": [*node.get("checks", []), self.row()]}


class Increasing(ArgumentCheck):
    """Numbers increase; of lists of numbers, the first of each."""

    def problem(self, value: Sequence[Any]) -> str | None:
        numbers = [each[0] if isinstance(each, Sequence) else each for each in value]
        wrong = next((f"{after:g} after {before:g}" for before, after in pairwise(numbers) if after <= before), None)
        return wrong and f"expected increasing numbers, got {wrong}"


class Ordered(ArgumentCheck):
    """The two numbers of a range: the lower one comes first."""

    def problem(self, value: Sequence[float]) -> str | None:
        return f"the lower bound comes first, got {list(value)}" if value[0] > value[1] else None


class Unique(ArgumentCheck):
    """No item appears twice."""

    def problem(self, value: Sequence[Any]) -> str | None:
        again = next((each for place, each in enumerate(value) if each in value[:place]), None)
        return None if again is None else f"expected each item once, got {again!r} again"


class SumsToOne(ArgumentCheck):
    """The values of a mapping are shares of a whole."""

    def problem(self, value: Mapping[str, float]) -> str | None:
        total = sum(value.values())
        return f"expected shares that add up to 1, got {total:g}" if abs(total - 1) > 1e-6 else None


class ArgumentsCheck(Check):
    """A check of several arguments together. An argument is given if it is neither None nor False."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments; None if nothing is."""
        raise NotImplementedError

    def given(self, values: Mapping[str, Any]) -> list[str]:
        """Those of the named arguments that are given."""
        return [name for name in self.words if values[name] is not None and values[name] is not False]


class ExactlyOneOf(ArgumentsCheck):
    """One of the arguments is given."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        given = self.given(values)
        found = " and ".join(given) or "none of them"
        return None if len(given) == 1 else f"give either {' or '.join(self.words)}, got {found}"


class AtLeastOneOf(ArgumentsCheck):
    """One or more of the arguments are given."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        return None if self.given(values) else f"give {' or '.join(self.words)}"


class AtMostOneOf(ArgumentsCheck):
    """No two of the arguments are given together."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        given = self.given(values)
        return f"give either {' or '.join(given)}, not both" if len(given) > 1 else None


class Requires(ArgumentsCheck):
    """`Requires("stride", "window")`: the first argument needs another, or one of several others."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        first, *others = self.words
        return f"{first} needs {' or '.join(others)}" if self.given(values) == [first] else None


class SameLength(ArgumentsCheck):
    """Those of the arguments that are given have an item for each item of the others."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        lengths = {name: len(values[name]) for name in self.given(values)}
        found = " and ".join(map(str, lengths.values()))
        expected = f"expected {' and '.join(lengths)} of the same length"
        return f"{expected}, got {found}" if len(set(lengths.values())) > 1 else None


class AtMost(ArgumentsCheck):
    """`AtMost("min_scale", "max_scale")`: the first argument is not above the second."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        low, high = (values[name] for name in self.words)
        if low is None or high is None or low <= high:
            return None
        return f"expected {self.words[0]} at most {self.words[1]} ({high:g}), got {low:g}"


class KeyOf(ArgumentsCheck):
    """`KeyOf("split", "split_shares")`: where the second argument is given, the first is one of its keys."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        key, mapping = self.words
        if values[mapping] is None or values[key] in values[mapping]:
            return None
        return f"{key} must be one of {mapping} ({', '.join(values[mapping])}), got {values[key]}"


def check_of(row: Row) -> Any:
    """The check that a row of the table describes."""
    name, *words = row
    kinds = [kind for base in (ArgumentCheck, ArgumentsCheck) for kind in base.__subclasses__()]
    return {kind.__name__: kind for kind in kinds}[name](*words)
