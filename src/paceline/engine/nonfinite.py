"""Non-finite gradients never reach the weights or a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import TrainingError
from paceline.optim.clipping import Norm

OnNonFinite = Literal["stop", "skip"]


class FiniteCheck:
    """Decides by the gradient norm, which all ranks share, whether the optimizer may step: alike on all ranks.

    Where reading a norm would make the host wait, the device decides. The host reads norms later, many at once, and
    then stops the run or warns of what was skipped: at most `limit` steps in a row. Once the run is to stop, no further
    step changes weights or optimizer state, and nothing is saved.
    """

    def __init__(self, policy: OnNonFinite = "stop", limit: int = 10) -> None:
        self.policy = policy
        self.limit = limit if policy == "skip" else 0
        self.in_a_row = 0
        """Skipped steps that the host has reported since the last finite norm."""

    def attach(self, optimizer: Optimizer, device: torch.device) -> None:
        """Start with nothing skipped; torch's fused optimizers look at `found_inf` in their kernels."""
        self._on_host = decides_on_host(optimizer, device)
        self.found_inf = torch.zeros((), device=device)
        self._is_skipped, self._num_skipped = False, 0  # of the host
        self._tainted = torch.zeros((), device=device)  # of the device
        self._in_a_row = torch.zeros((), dtype=torch.int32, device=device)
        if not self._on_host:
            optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, int]:
        """How many of the last steps were skipped, when the host has read all norms."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue to count, up to the limit of this policy: only a new step ends a run."""
        self.in_a_row = self._num_skipped = min(state.get("in_a_row", 0), self.limit)
        self._in_a_row.fill_(self.in_a_row)

    def decide(self, norm: Norm, overflowed: Tensor | None) -> bool:
        """Whether the host is to call the optimizer; `overflowed` if the loss scale is to blame for the norm.

        `found_inf` is 1 where the step must be skipped.
        """
        if self._on_host:
            return self._decide_on_host(norm, overflowed)
        self._decide_on_device(torch.as_tensor(norm), overflowed)
        return True

    def _decide_on_host(self, norm: Norm, overflowed: Tensor | None) -> bool:
        is_bad = not math.isfinite(norm)
        if not is_bad and not self._is_skipped:
            return True
        if is_bad:
            self._num_skipped += not overflowed
        elif self._num_skipped <= self.limit:
            self._num_skipped = 0
        self._is_skipped = is_bad or self._num_skipped > self.limit
        self.found_inf.fill_(self._is_skipped)
        return not self._is_skipped

    def _decide_on_device(self, norm: Tensor, overflowed: Tensor | None) -> None:
        if overflowed is None and self.policy == "stop":
            self._tainted.add_(norm, alpha=0)  # stays 0, and is NaN from the first norm on that is not finite
            torch.nan_to_num(self._tainted, nan=1.0, out=self.found_inf)
            return
        is_bad = ~norm.isfinite()
        is_counted = is_bad if overflowed is None else is_bad & ~overflowed
        has_ended = self._in_a_row > self.limit
        self._in_a_row = torch.where(is_bad | has_ended, self._in_a_row + is_counted, 0)
        self.found_inf.copy_(is_bad | (self._in_a_row > self.limit))

    def report(self, norm: float, step: int, explain: Callable[[], str], warn: Callable[[str], None]) -> None:
        """Act on a norm that is not finite, and not due to the loss scale; the host calls it in order.

        Raises TrainingError if the run must stop.
        """
        self.in_a_row += 1
        row = f", {self.in_a_row} steps in a row" if self.in_a_row > 1 else ""
        what = f"the gradient of step {step + 1} is not finite (norm {norm:g}{row}): {explain()}"
        if self.in_a_row <= self.limit:
            warn(f"{what}; the step is skipped")
            return
        cure = "Try a lower optimizer.lr, warm-up, or train.clip_grad_norm"
        if step == 0:
            cure = "No update was made yet, so the cause is in the data, the model or the loss"
        raise TrainingError(f"{what}; the weights before it are kept. {cure}")


def decides_on_host(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether reading a norm waits for nothing, or has to be waited for: an optimizer that is not fused asks nobody."""
    return device.type == "cpu" or not all(group.get("fused") for group in optimizer.param_groups)
