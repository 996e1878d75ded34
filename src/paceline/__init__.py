"""Paceline trains vision models from one recipe, on one device or many, exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.core.process import limit_spinning

if TYPE_CHECKING:
    from paceline.core.registry import register
    from paceline.engine.evaluate import evaluate
    from paceline.engine.step import train_step
    from paceline.recipe.build import build
    from paceline.recipe.build_predictor import load
    from paceline.recipe.recipe import Recipe
    from paceline.run.train import train
    from paceline.tasks.task import Task

limit_spinning()  # now, since a script may import torch next

__version__ = "0.1.0"
__all__ = ["Recipe", "Task", "build", "evaluate", "load", "register", "train", "train_step"]

# Imported on first use: `import paceline` stays free of torch.
_HOMES = {
    "Recipe": "paceline.recipe.recipe",
    "Task": "paceline.tasks.task",
    "build": "paceline.recipe.build",
    "evaluate": "paceline.engine.evaluate",
    "load": "paceline.recipe.build_predictor",
    "register": "paceline.core.registry",
    "train": "paceline.run.train",
    "train_step": "paceline.engine.step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
