"""Where a number that is not finite came from: the first module whose output has one, and the samples it had."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.core.text import join_first
from paceline.data.loader import MicroBatch, StepBatch
from paceline.engine.forward import forward
from paceline.engine.run import Run

_SHOWN = 8


def diagnose(run: Run, step_batch: StepBatch) -> str:
    """A sentence on what this process's part of the step has to say; the forward passes are done once more."""
    bad_gradients = [
        name
        for name, parameter in run.model.named_parameters()
        if parameter.grad is not None and not _is_finite(parameter.grad)
    ]
    with torch.no_grad(), run.strategy.unchanged():
        # All of them, whatever the first says: processes may have to keep step with each other.
        found = [_first_bad_module(run, micro) for micro in step_batch.micro_batches]
    for micro, sentence in zip(step_batch.micro_batches, found, strict=True):
        if sentence is not None and not micro.is_padding:
            return sentence
    if bad_gradients:
        return f"outputs are finite, the gradients of {join_first(bad_gradients[::-1], 3)} are not"
    return "all values on this rank are finite"


def _first_bad_module(run: Run, micro: MicroBatch) -> str | None:
    inputs = [(name, value) for name, value in micro.batch.items() if isinstance(value, Tensor)]
    for name, value in inputs:
        if value.is_floating_point() and not _is_finite(value):
            return f"{name} of {_samples(value, micro)} is not finite before the model sees it"
    first: list[str] = []

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
        for name, module in run.model.named_modules():
            handle = module.register_forward_hook(lambda m, a, o, name=name: look(m, a, o, name))
            stack.callback(handle.remove)
        terms = forward(run, micro)
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
    return f"sample{'s' if len(ids) > 1 else ''} {join_first(ids.tolist(), _SHOWN)}"


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(getattr(value, "to_local", lambda: value)()).all())
