"""Checks of what users register: the methods and arguments that each kind needs. Needs no torch."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.core.errors import PacelineError, UsageError
from paceline.core.signatures import signature_of

# Methods of torch's base classes that do nothing by themselves.
_UNIMPLEMENTED = {"_forward_unimplemented", "Module._wrapped_call_impl", "Dataset.__getitem__"}


class RegistrationError(UsageError, ValueError):
    """What was registered cannot be used; the message names the file and line, what is missing and an example."""


@contextmanager
def registration_place(kind: str, name: str) -> Iterator[None]:
    """Have errors in registering a part name the file and line of the decorator."""
    frame = sys._getframe(3)  # behind this generator, its context manager and the decorator
    try:
        yield
    except PacelineError:
        raise
    except (ValueError, TypeError, NameError, AttributeError) as error:
        place = f"{relative_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        raise RegistrationError(f"{place}: register.{kind}({name!r}): {error}") from error


def check_contract(kind: str, target: Callable[..., Any]) -> None:
    """Raise TypeError if a class, or a function that is a loss itself, lacks what its kind needs."""
    if not hasattr(target, "__qualname__"):
        made = type(target).__name__
        raise TypeError(f"got an object of {made}; register the class, without (): `register.{kind}(...)({made})`")
    if inspect.isclass(target):
        for names, example in _METHODS.get(kind, {}).items():
            if not any(_method(target, name) for name in names):
                raise TypeError(_missing(kind, target, names[0], example))
        if kind in _CHECKS:
            _CHECKS[kind](target)
    elif kind == "loss" and is_criterion(target) and len(_required(target)) < 2:
        raise TypeError(
            f"{target.__name__} takes one tensor, expected two: `def {target.__name__}(output, target)`; if it makes"
            " the loss instead, annotate what it takes from the recipe: `gamma: float`"
        )


def is_criterion(target: Callable[..., Any]) -> bool:
    """Whether a function is a loss itself, `(output, target, …)`, and not one that makes a loss.

    Its first parameter has no default, and is annotated as a tensor or not at all.
    """
    if inspect.isclass(target):
        return False
    first = next(iter(signature_of(target).parameters.values()), None)
    is_required = first is not None and first.default is first.empty and first.kind is not first.KEYWORD_ONLY
    return is_required and first is not None and (first.annotation is first.empty or "Tensor" in str(first.annotation))


def supplied_to_loss(target: Callable[..., Any], known: set[str]) -> set[str]:
    """The parameters of a user's loss that no recipe gives: output and target, and those `known` to the builder.

    One with a default, such as `ignore_index` of torch's losses, is left to the recipe.
    """
    parameters = signature_of(target).parameters
    compared = set(list(parameters)[:2]) if is_criterion(target) else set()
    return compared | {name for name in known & set(parameters) if parameters[name].default is inspect.Parameter.empty}


def _check_loss(target: type) -> None:
    call = _method(target, "forward") or _method(target, "__call__")
    compared = _required(call)[1:] if call else []
    if _method(target, "count") is None and compared[1:2] == ["batch"]:
        raise TypeError(_missing("loss", target, "count", "def count(self, batch): return float(batch.size)"))
    _check_compared(target, call, "output, target")


def _check_metric(target: type) -> None:
    own = vars(target).items() if not target.__module__.startswith("torchmetrics") else ()
    for name, value in own:
        if type(value) in (list, dict, set) and not value and not name.startswith("_"):
            found = f"{target.__name__}.{name} is a {type(value).__name__} of the class, which all evaluations share"
            raise TypeError(f"{found}; set it in __init__: `self.{name} = {value!r}`")
    _check_compared(target, _method(target, "update"), "preds, target")


def _check_compared(target: type, call: Callable[..., Any] | None, arguments: str) -> None:
    """A loss and a metric compare two tensors."""
    if call and len(compared := _required(call)[1:]) < 2:
        found = f"({', '.join(compared)})" if compared else "nothing"
        expected = f"def {call.__name__}(self, {arguments})"
        raise TypeError(f"{target.__name__}.{call.__name__} takes {found}, expected `{expected}`")


def _check_task(target: type) -> None:
    for name, call in _TASK_CALLS.items():
        method = _method(target, name)
        if not inspect.isfunction(method):
            continue
        signature = signature_of(method)
        try:
            signature.bind(*call.split(", "))
        except TypeError:
            raise TypeError(f"{target.__name__}.{name} takes {signature}, expected `def {name}{call}`") from None


_METHODS: dict[str, dict[tuple[str, ...], str]] = {
    "loss": {("forward", "__call__"): "def forward(self, output, target): return (output - target).abs().mean()"},
    "dataset": {
        ("__getitem__", "read"): "def __getitem__(self, index): return image, target",
        ("__len__",): "def __len__(self): return len(self.files)",
    },
    "transform": {("__call__", "forward", "transform"): "def __call__(self, image): return image.flip(-1)"},
    "metric": {
        ("update",): "def update(self, preds, target): self.total += (preds - target).abs().sum()",
        ("compute",): "def compute(self): return self.total / self.count",
    },
    "task": {
        ("counts",): (
            "def counts(self, batch): return {name: loss.count(batch) for name, loss in self.loss_functions.items()}"
        ),
        ("losses",): "def losses(self, model, batch): return {name: LossTerm(numerator, denominator)}",
        ("predict",): 'def predict(self, model, batch): return model(batch["image"])',
        ("metrics",): "def metrics(self): return self.extra_metrics",
    },
    "model": {("forward",): "def forward(self, images): return self.head(self.body(images))"},
}
"""The methods that each kind needs, one of several names for the same, with an example of the first."""

_TASK_CALLS = {
    "forward": "(self, model, batch)",
    "counts": "(self, batch)",
    "losses": "(self, model, batch)",
    "predict": "(self, model, batch)",
    "metrics": "(self)",
    "draw": "(self, batch, predictions, index)",
    "draw_prediction": "(self, image, batch, predictions, index)",
}

_CHECKS = {"loss": _check_loss, "metric": _check_metric, "task": _check_task}


def _method(target: type, name: str) -> Callable[..., Any] | None:
    """The method of a class or of a class it inherits from, not of its metaclass; None if it only raises."""
    for base in target.__mro__[:-1]:
        found: Any = base.__dict__.get(name)
        if found is not None:
            return None if {found.__name__, found.__qualname__} & _UNIMPLEMENTED else found
    return None


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of what must be given by position; what takes any number of values takes two more."""
    names: list[str] = []
    for name, parameter in signature_of(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"*{name}"] * 2
        elif parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            names.append(name)
    return names


def _missing(kind: str, target: type, method: str, example: str) -> str:
    is_stream = kind == "dataset" and method == "__getitem__" and _method(target, "__iter__")
    found = " (it is iterable, but samples are asked for by number)" if is_stream else ""
    cure = "; or inherit from paceline.Task, which has all of them" if kind == "task" else ""
    return f"{target.__name__} has no method {method}{found}; add it, such as `{example}`{cure}"


def relative_path(file: str) -> str:
    """A path as it is seen from the working folder, if it lies below it."""
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative
