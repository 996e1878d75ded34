"""Which errors of a rehearsal are a reason to refuse a row, and which are mistakes."""

from __future__ import annotations

import re
import traceback

from paceline.core.errors import PacelineError, TrainingError
from paceline.core.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
from paceline.core.user_code import described

_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedMutationAliasingException, UnsupportedOperatorException)
# What torch says, in plain RuntimeErrors, of tensors without memory and of operators without a kernel for them.
_WITHOUT_MEMORY = re.compile(r"tensor subclasses|fake ?tensor|\bmeta\b|Could not run 'aten::", re.IGNORECASE)


def limit_of_fake_tensors(error: BaseException) -> str | None:
    """Why fake tensors cannot follow a step that raised this; None if they can and something else is wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _VALUES) or (isinstance(cause, ZeroDivisionError) and _is_in_optimizer(cause)):
            return f"{described(cause)} depends on values, which the fake tensors of a plan do not have"
        if isinstance(cause, _UNSUPPORTED) or (isinstance(cause, RuntimeError) and _WITHOUT_MEMORY.search(str(cause))):
            text = str(error) if isinstance(error, PacelineError) else described(cause)
            sentence = text.partition(". ")[0]  # torch goes on to list its backends
            return f"the fake tensors of a plan cannot follow this step: {sentence}"
        cause = cause.__cause__
    return None


def _is_in_optimizer(error: BaseException) -> bool:
    """A number that is read from a fake tensor of ones stays 1; NAdam divides by its distance from 1."""
    frames = [] if error.__traceback__ is None else traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/optim/" in frames[-1].filename


def is_refusal(error: BaseException) -> bool:
    """Whether an error says what is wrong with the recipe, its data or the number of processes, as before a run."""
    return isinstance(error, PacelineError) and not isinstance(error, TrainingError | KeyError)
