"""Failures of training, re-raised with advice the user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.core.errors import TrainingError
from paceline.core.text import pluralize
from paceline.data.loader import explain_dead_workers
from paceline.engine.run import Run


@contextmanager
def explain_failures(run: Run) -> Iterator[None]:
    """Re-raise dead loader workers and lack of memory with advice."""
    with explain_dead_workers(), explain_out_of_memory(run):
        yield


@contextmanager
def explain_out_of_memory(run: Run) -> Iterator[None]:
    """Turn torch's word that memory ran out into what can be done about it."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in text:
            raise
        updates = run.batches.updates
        size = max(cut.stop - cut.start for cut in updates.slices(run.progress.step))
        half = f"train.micro_batch_size={size // 2} (the same steps in smaller parts), " if size > 1 else ""
        what = f"out of memory in step {run.progress.step + 1}, with {pluralize(size, 'sample')} at a time"
        raise TrainingError(
            f"{what} ({text.splitlines()[0]})."
            f" Try {half}train.activation_checkpointing=blocks, train.precision=bf16, or train.strategy=fsdp on several"
            " processes"
        ) from error
