"""The data section of a recipe by itself; the rest of the recipe may be missing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from paceline.commands.common import recipe_file, use_modules
from paceline.recipe.document import Document, Origin
from paceline.recipe.load import load, merge
from paceline.recipe.validate import CheckedRecipe, validate

if TYPE_CHECKING:
    from paceline.data.split_loader import SplitLoader

_SPLITS = ("train", "val", "test")
# What a recipe has to have beside its data, as plain as can be: nothing of it is built.
_PLACEHOLDER: dict[str, Any] = {
    "task": {"name": "classification"},
    "model": {"name": "convnet"},
    "data": {"batch_size": 1},
    "losses": [{"name": "cross_entropy"}],
    "optimizer": {"name": "sgd", "lr": 0.1},
    "train": {"epochs": 1},
}


def open_split(checked: CheckedRecipe, split: str) -> SplitLoader:
    """Open one split with its transforms, or raise DataError."""
    import torch

    from paceline.core.world import World
    from paceline.recipe.build_context import BuildContext
    from paceline.recipe.build_data import make_split_loaders

    kept, _, name = split.partition(".")
    changes: dict[str, Any] = {each: None for each in _SPLITS if each != kept}
    if name:
        changes["test"] = {name: checked.recipe.data.splits()[split]}
    recipe = checked.recipe.model_copy(update={"data": checked.recipe.data.model_copy(update=changes)})
    context = BuildContext(CheckedRecipe(recipe, checked.document), World(0, 1, 0, torch.device("cpu")))
    return make_split_loaders(context)[split]


def read_data_recipe(options: argparse.Namespace) -> CheckedRecipe:
    """A command line's recipe with its own data section and name; the rest stands for anything."""
    use_modules(options.use)
    return validate(_data_alone(load(recipe_file(options.recipe), options.overrides)))


def _data_alone(document: Document) -> Document:
    """Name, data and seed of a recipe, with placeholders for everything else."""
    kept = {key: value for key, value in document.tree.items() if key in ("name", "data")}
    train = document.tree.get("train")
    if isinstance(train, dict) and "seed" in train:
        kept["train"] = {"seed": train["seed"]}
    own = Document(kept)
    for table, origins in ((own.keys, document.keys), (own.values, document.values)):
        table.update({path: origin for path, origin in origins.items() if path == () or path[0] in kept})
    return merge(_placeholder(own.values[()]), own)


def _placeholder(origin: Origin) -> Document:
    from paceline.recipe.document import places

    return Document(_PLACEHOLDER, {}, dict.fromkeys(places(_PLACEHOLDER, ()), origin))
