"""The data section of a recipe by itself; the rest of the recipe may be missing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.commands.common import recipe_file, use_modules
from paceline.recipe.document import Document, Origin
from paceline.recipe.load import load, merge
from paceline.recipe.schema import Data
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


@dataclass(frozen=True)
class DataRecipe:
    """The checked data section of a recipe."""

    checked: CheckedRecipe

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.checked.recipe.name

    @property
    def splits(self) -> list[str]:
        """The splits in the recipe."""
        return list(self.checked.recipe.data.splits())

    def dataset_name(self, split: str) -> str:
        """The registered name of a split's data set."""
        return self.checked.recipe.data.splits()[split].dataset

    def source(self, split: str) -> SplitLoader:
        """Open one split with its transforms, or raise DataError."""
        import torch

        from paceline.core.world import World
        from paceline.recipe.build_context import BuildContext
        from paceline.recipe.build_data import make_split_loaders

        # No cache: each sample is read once, and its loading time is measured.
        kept, _, name = split.partition(".")
        changes: dict[str, Any] = {each: None for each in _SPLITS if each != kept} | {"cache": "none"}
        if name:
            changes["test"] = {name: self.checked.recipe.data.splits()[split]}
        data: Data = self.checked.recipe.data.model_copy(update=changes)
        recipe = self.checked.recipe.model_copy(update={"data": data})
        context = BuildContext(CheckedRecipe(recipe, self.checked.document), World(0, 1, 0, torch.device("cpu")))
        return make_split_loaders(context)[split]


def read_data_recipe(options: argparse.Namespace) -> DataRecipe:
    """The data section of a command line's recipe, after importing the modules of `--use`."""
    use_modules(options.use)
    return DataRecipe(validate(_data_alone(load(recipe_file(options.recipe), options.overrides))))


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
