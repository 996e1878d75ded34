"""Whether training can go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from paceline.core.counting import counted
from paceline.core.errors import TrainingError
from paceline.data.loading.loader import Update
from paceline.engine.diagnosis import diagnose
from paceline.observe.events import Note

if TYPE_CHECKING:
    from paceline.engine.run import Run

OnNonFinite = Literal["stop", "skip"]
Explain = Callable[["Run", Update], str]


@contextmanager
def naming_lack_of_memory(run: Run) -> Iterator[None]:
    """Turn torch's word that memory ran out into what can be done about it."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in text:
            raise
        updates = run.batches.updates
        size = max(cut.stop - cut.start for cut in updates.cuts(run.progress.step))
        half = f"train.micro_batch={size // 2} (the same updates in smaller parts), " if size > 1 else ""
        what = f"out of memory in update {run.progress.step + 1}, with {counted(size, 'sample')} at a time"
        raise TrainingError(
            f"{what} ({text.splitlines()[0]})."
            f" Try {half}model.checkpointing=blocks, train.precision=bf16, or train.strategy=fsdp on several processes"
        ) from error


class FiniteCheck:
    """Keeps an update whose gradient is not finite from the weights and from every checkpoint.

    It is judged on the norm that all processes share, so all decide alike. The policy is to stop, or to leave such
    updates out, at most `limit` in a row.
    """

    def __init__(self, policy: OnNonFinite = "stop", limit: int = 10, explain: Explain = diagnose) -> None:
        self.policy = policy
        self.limit = limit
        self.explain = explain
        self.in_a_row = 0

    def accepts(self, run: Run, update: Update, norm: Tensor) -> bool:
        """Whether the update may reach the weights; raises TrainingError if the run has to end."""
        if math.isfinite(norm.item()):
            self.in_a_row = 0
            return True
        finding = self.explain(run, update)
        self.in_a_row += 1
        what = f"the gradient of update {update.step + 1} is not finite (norm {norm.item():g}): {finding}"
        if self.policy == "skip" and self.in_a_row <= self.limit:
            run.observer.emit(Note(f"{what}; the update is left out", "warning"))
            return False
        row = f" {self.in_a_row} times in a row" if self.in_a_row > 1 else ""
        raise TrainingError(
            f"{what}{row}; the weights before it are kept. Try a lower optimizer.lr, warm-up, or train.clip_norm"
        )
