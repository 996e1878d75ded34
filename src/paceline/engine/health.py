"""Whether training can go on."""

from __future__ import annotations

import math

from torch import Tensor

from paceline.core.errors import TrainingError
from paceline.data.loader import Update
from paceline.engine.tally import Tally


class FiniteCheck:
    """Ends the run before an update whose gradient is not finite reaches the weights or a checkpoint."""

    def judge(self, update: Update, norm: Tensor, tally: Tally) -> None:
        """Raise TrainingError naming the losses and the samples unless the norm of the gradient is finite."""
        if math.isfinite(norm.item()):
            return
        figures = ", ".join(f"{name} {value.item():g}" for name, value in tally.own().items())
        ids = [int(i) for micro in update.microbatches for i in micro.batch.ids[:8]]
        raise TrainingError(
            f"the gradient of update {update.step + 1} is not finite (norm {norm.item():g}; {figures}; first samples"
            f" {ids[:8]}); the weights before it are kept. Try a lower optimizer.lr, warm-up, or train.clip_norm"
        )
