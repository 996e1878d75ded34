"""The ways of activation checkpointing that recipes can name."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from paceline.core.arguments import Arguments, Count, Positive
from paceline.core.registry import register

checkpointing = register.kind("checkpointing")


class BlocksArguments(Arguments):
    """Arguments of `blocks`."""

    every: Count = 1
    """2: every second block, beginning with the first."""
    match: list[str] = []
    """Patterns of the modules to compute again; none: found from the model's structure."""


class SelectiveArguments(Arguments):
    """Arguments of `selective`."""

    match: list[str] = []
    """Patterns of the modules to compute again; none: found from the model's structure."""


class BudgetArguments(Arguments):
    """Arguments of `budget`: megabytes or share."""

    megabytes: Positive | None = None
    """Activations that may stay kept for a micro-batch."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """The same as a part of what is kept without checkpointing."""
    match: list[str] = []
    """Patterns of the modules to choose from; none: found from the model's structure."""

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.megabytes is None) == (self.share is None):
            raise ValueError("expected either megabytes or share")
        return self


_OURS = "paceline.engine.remat"
checkpointing.add("none", f"{_OURS}:NoRemat", summary="all activations are kept")
checkpointing.add("blocks", f"{_OURS}:Blocks", BlocksArguments, "blocks compute their activations again")
checkpointing.add(
    "selective", f"{_OURS}:Selective", SelectiveArguments, "the same, but outputs of convolutions and products are kept"
)
checkpointing.add(
    "budget", f"{_OURS}:Budget", BudgetArguments, "as few blocks as it takes for the activations that stay to fit"
)
