"""What the state in a checkpoint must look like before a run takes it over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from paceline.checkpoint.store import Checkpoint
from paceline.core.errors import CheckpointError

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = float | Literal["nan", "inf", "-inf"]


class _Saved(BaseModel):
    """Values of exactly these types; what a later version adds is let through."""

    model_config = ConfigDict(strict=True, extra="allow", arbitrary_types_allowed=True)


class _Progress(_Saved):
    step: Count


class _Group(_Saved):
    names: list[str]


class _Optimizer(_Saved):
    kind: str
    shapes: dict[str, list[Count]]
    state: dict[str, dict[str, Any]]
    groups: list[_Group]


class _Average(_Saved):
    steps: Count = 0
    count: Count = 0
    average: dict[str, Tensor] = {}


class _Meter(_Saved):
    window: list[Number]
    sum: Number
    count: Count


class _Data(_Saved):
    classes: list[str]
    num_samples: Count
    digest: str
    groups: dict[str, Annotated[list[Count | str], Field(min_length=3, max_length=3)]]


class _State(_Saved):
    progress: _Progress
    optimizer: _Optimizer
    averaging: _Average
    precision: dict[str, Any]
    parts: dict[str, Any] = {}
    meters: dict[str, _Meter]
    metrics: dict[str, dict[str, Any]]
    threads: Annotated[int, Field(ge=1, le=65536)]
    micro_batch_size: Annotated[int, Field(ge=1, lt=2**63)]
    world: Annotated[int, Field(ge=1, lt=2**31)]
    recipe: dict[str, Any]
    data: dict[str, _Data] = {}


def check_state(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the state is not that of a run, whatever its checksums say."""
    try:
        saved = _State.model_validate(checkpoint.state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        found = "" if first["type"] == "missing" else f", found {repr(first['input'])[:60]}"
        raise CheckpointError(f"{checkpoint.path}: state.json: {place}: {first['msg']}{found}") from error
    if saved.progress.step != checkpoint.step:
        raise CheckpointError(
            f"{checkpoint.path}: state.json: progress.step: expected {checkpoint.step}, found {saved.progress.step}"
        )


@contextmanager
def restoring(what: str, path: Path) -> Iterator[None]:
    """Have whatever a part says of a state that does not fit it said as what it is: a checkpoint that does not fit."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise CheckpointError(f"{path}: the {what} cannot be restored: {type(error).__name__}: {reason}") from error
