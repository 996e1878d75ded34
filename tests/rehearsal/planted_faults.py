"""Mistakes that only a GPU would show, planted into a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def mismatch(tensor: Tensor) -> Tensor:
    """The tensor plus one that was left on the host."""
    return tensor + torch.ones(tensor.shape or (1,))


def read(tensor: Tensor) -> Tensor:
    """The tensor, after the host looked at a value."""
    return tensor if bool(tensor.sum() > -1) else tensor * 2


KINDS = {"mismatch": mismatch, "read": read}
PLACES = ("transform", "loss", "metric", "ema", "clip")


@contextmanager
def planted(fault: str, run: Any) -> Iterator[None]:
    """A mistake such as "loss: read" in a run."""
    place, _, kind = fault.partition(": ")
    make = KINDS[kind]
    if place == "transform":
        with patch.object(run.train_loader, "transform_batch", _images(run.train_loader.transform_batch, make)):
            yield
    elif place == "loss":
        with patch.object(run.task, "losses", _losses(run.task.losses, make)):
            yield
    elif place == "metric":
        with patch.object(run.task, "training_terms", _terms(run.task.training_terms, make)):
            yield
    elif place == "ema":
        with patch.object(run.averaging, "update", _weights(run.averaging.update, make)):
            yield
    else:
        clip = run.clip
        with patch.object(run, "clip", lambda parameters: make(clip(parameters))):
            yield


def _images(transform: Any, make: Any) -> Any:
    def changed(*args: Any) -> Any:
        batch = transform(*args)
        batch["image"] = make(batch["image"])
        return batch

    return changed


def _losses(losses: Any, make: Any) -> Any:
    def changed(*args: Any) -> Any:
        return {name: term._replace(numerator=make(term.numerator)) for name, term in losses(*args).items()}

    return changed


def _terms(terms: Any, make: Any) -> Any:
    def changed(outputs: Tensor, batch: Any) -> Any:
        return terms(make(outputs), batch)

    return changed


def _weights(update: Any, make: Any) -> Any:
    def changed(model: Any) -> None:
        for parameter in model.parameters():
            make(parameter.detach())
        update(model)

    return changed
