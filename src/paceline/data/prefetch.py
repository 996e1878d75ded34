"""Batches on their way to a graphics card, copied while it computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.data.batch import Batch


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches, on a CUDA device copied there by a stream of its own; on any other they stay where they are.

    The copy of a batch is asked for while the device is still busy with the one before, and waits for nothing of it.
    """
    return _copied(batches, device) if device.type == "cuda" else batches


def _copied(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = batch.pin_memory().to(device)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for value in moved.values():
            _keep_until_used(value, current)
        moved["id"] = batch["id"]  # what is drawn for samples is computed on the host
        yield moved


def _keep_until_used(value: object, stream: torch.cuda.Stream) -> None:
    """Have memory that one stream wrote not be used again before another has read it."""
    if isinstance(value, Tensor):
        value.record_stream(stream)
    elif isinstance(value, list):
        for item in value:
            _keep_until_used(item, stream)
