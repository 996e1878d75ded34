"""How arguments are described without torch: one strict pydantic base and the number types that recipes use."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


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
