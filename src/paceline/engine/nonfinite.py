"""Non-finite gradients never reach the weights or a checkpoint; where one came from is traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.state import Tree
from paceline.core.errors import TrainingError
from paceline.core.text import join_first
from paceline.core.torch_private import foreach, tree_leaves
from paceline.data.loader import MicroBatch
from paceline.engine.stateful import Parts, copy_state, load_state
from paceline.losses.loss_term import AnyTerm
from paceline.optim.clipping import Norm
from paceline.optim.found_inf import skip_on_inf

OnNonFinite = Literal["stop", "skip"]


class FiniteCheck:
    """Decides on the device, by the gradient norm that all ranks share, whether the optimizer may step.

    The host reads norms later, many at once, and then stops the run or warns of what was skipped: at most `limit` steps
    in a row. Once the run is to stop, no further step changes weights or optimizer state, and nothing is saved.
    """

    def __init__(self, policy: OnNonFinite = "stop", limit: int = 10) -> None:
        self.policy = policy
        self.limit = limit if policy == "skip" else 0
        self.in_a_row = 0
        """Skipped steps that the host has read of since the last finite norm."""

    def attach(self, optimizer: Optimizer, device: torch.device) -> None:
        """Have the optimizer follow the decisions."""
        self.found_inf = torch.zeros((), device=device)
        self._tainted = torch.zeros((), device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int32, device=device)
        skip_on_inf(optimizer, self.found_inf)

    def state_dict(self) -> dict[str, int]:
        """How many of the last steps were skipped, when the host has read all norms."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue to count, up to the limit of this policy: only a new step ends a run."""
        self.in_a_row = min(state.get("in_a_row", 0), self.limit)
        self._in_a_row.fill_(self.in_a_row)

    def decide(self, norm: Norm, overflowed: Tensor | None) -> bool:
        """Set `found_inf` to 1 where the optimizer must skip this step; `overflowed` if the loss scale is to blame.

        Whether the host is to call the optimizer: always, since the optimizer looks at `found_inf` itself.
        """
        norm = torch.as_tensor(norm)
        if overflowed is None and self.policy == "stop":
            self._tainted.add_(norm, alpha=0)  # stays 0, and is NaN from the first norm on that is not finite
            torch.nan_to_num(self._tainted, nan=1.0, out=self.found_inf)
            return True
        is_bad = ~norm.isfinite()
        is_counted = is_bad if overflowed is None else is_bad & ~overflowed
        has_ended = self._in_a_row > self.limit
        self._in_a_row = torch.where(is_bad | has_ended, self._in_a_row + is_counted, 0)
        self.found_inf.copy_(is_bad | (self._in_a_row > self.limit))
        return True

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


class HostFiniteCheck(FiniteCheck):
    """The same decisions on a CPU, where reading a number waits for nothing: a skipped step calls no optimizer."""

    def attach(self, optimizer: Optimizer, device: torch.device) -> None:
        """Start with nothing skipped; no optimizer has to know."""
        self.found_inf = torch.zeros((), device=device)
        self._is_skipped = False
        self._num_skipped = 0

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue to count."""
        self.in_a_row = self._num_skipped = min(state.get("in_a_row", 0), self.limit)

    def decide(self, norm: Norm, overflowed: Tensor | None) -> bool:
        """Whether the optimizer may step; `overflowed` if the loss scale is to blame."""
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


class NoBackup:
    """For runs without a loss scale that stop at a non-finite step: their buffers are not used afterwards."""

    def keep(self) -> None:
        """Keep nothing."""

    def restore(self, found_inf: Tensor) -> None:
        """Nothing was kept."""


class BufferBackup:
    """Copies of a model's buffers, in reused memory, and of the state of losses."""

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self._parts = parts
        self._state: Tree = {}
        groups: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            groups.setdefault(buffer.dtype, []).append(buffer)
        self._groups = [(group, [buffer.clone() for buffer in group]) for group in groups.values()]

    def keep(self) -> None:
        """Before a step."""
        for own, copies in self._groups:
            foreach("copy_", copies, own)
        self._state = copy_state(self._parts)

    def restore(self, found_inf: Tensor) -> None:
        """After a step, if it is skipped; decided on the device, but for losses and tasks that have a state."""
        is_skipped = found_inf > 0
        for own, copies in self._groups:
            for buffer, copy in zip(own, copies, strict=True):
                torch.where(is_skipped, copy, buffer, out=buffer)
        if self._parts and is_skipped:
            load_state(self._parts, self._state)


Pass = Callable[[MicroBatch], Mapping[str, AnyTerm]]
"""A forward and a backward pass of a micro-batch; gives its losses."""
_MAX_IDS = 8


def find_nonfinite(model: nn.Module, micro_batches: Sequence[MicroBatch], run_pass: Pass) -> str:
    """What is not finite in this rank's part of a step, in one sentence; the passes are repeated."""
    # All of them, whatever the first says: processes may have to keep step with each other.
    found = [_first_bad_module(model, micro, run_pass) for micro in micro_batches]
    for micro, sentence in zip(micro_batches, found, strict=True):
        if sentence is not None and not micro.is_padding:
            return sentence
    named = model.named_parameters()
    bad_gradients = [name for name, each in named if each.grad is not None and not _is_finite(each.grad)]
    if bad_gradients:
        return f"outputs are finite, the gradients of {join_first(bad_gradients[::-1], 3)} are not"
    return "all values on this rank are finite"


def _first_bad_module(model: nn.Module, micro: MicroBatch, run_pass: Pass) -> str | None:
    first = [
        f"{name} of {_samples(value, micro)} is not finite before the model sees it"
        for name, value in micro.batch.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not _is_finite(value)
    ]

    def look(module: nn.Module, args: Any, output: Any, name: str) -> None:
        if not first:
            for value in tree_leaves(output):
                if isinstance(value, Tensor) and value.is_floating_point() and not _is_finite(value):
                    kind = type(module).__name__
                    first.append(
                        f"{name or 'the model'} ({kind}) gives what is not finite for {_samples(value, micro)}"
                    )
                    return

    with ExitStack() as stack:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(lambda m, a, o, name=name: look(m, a, o, name))
            stack.callback(handle.remove)
        terms = run_pass(micro)
    if first:
        return first[0]
    bad = [name for name, term in terms.items() if not _is_finite(term.numerator)]
    return f"the model's outputs are finite, the loss {bad[0]} is not, for {_samples(None, micro)}" if bad else None


def _samples(value: Tensor | None, micro: MicroBatch) -> str:
    """The samples whose rows are not finite, or else all of the micro-batch."""
    ids = micro.batch.ids
    if value is not None and value.ndim and len(value) == len(ids):
        rows = ~torch.isfinite(value.reshape(len(value), -1)).all(1).cpu()
        ids = ids[rows]
    return f"sample{'s' if len(ids) > 1 else ''} {join_first(ids.tolist(), _MAX_IDS)}"


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(getattr(value, "to_local", lambda: value)()).all())
