"""The places of a recipe that hold registered parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.recipe import schema
from paceline.recipe.document import KeyPath, are_named_parts, children, lookup
from paceline.recipe.schema import DatasetPart, Part, Recipe

SEVERAL = "{}"


@dataclass(frozen=True)
class PartSpec:
    """A place in a recipe that holds a part registered under `kind`.

    In `pattern`, "*" stands for each item of a list, and "test{}" for `test` or, where that is a mapping of names to
    parts, for each of these; `section` describes the keys that all names have in common.
    """

    pattern: tuple[str, ...]
    kind: str
    name_key: str
    section: type[Part]

    def places(self, tree: Any) -> list[KeyPath]:
        """The places of such parts in a tree, or in a recipe that is valid."""
        found: list[KeyPath] = [()]
        for entry in self.pattern:
            key = entry.removesuffix(SEVERAL)
            found = [
                (*path, segment)
                for path in found
                for segment, _ in children(lookup(tree, path))
                if segment == key or (entry == "*" and isinstance(segment, int))
            ]
            if entry.endswith(SEVERAL):
                found = [inner for path in found for inner in _named_parts(path, lookup(tree, path))]
        return found

    def sections(self, recipe: Recipe) -> dict[KeyPath, Part]:
        """The parts of a valid recipe by their places."""
        found = {path: lookup(recipe, path) for path in self.places(recipe)}
        return {path: section for path, section in found.items() if section is not None}


def _named_parts(path: KeyPath, value: Any) -> list[KeyPath]:
    return [(*path, name) for name in value] if are_named_parts(value) else [path]


_SPLITS = ("train", "val", "test{}")
DATASETS = [PartSpec(("data", split), "dataset", "dataset", DatasetPart) for split in _SPLITS]
PARTS = [
    PartSpec(("task",), "task", "name", schema.TaskPart),
    PartSpec(("model",), "model", "name", schema.ModelPart),
    *DATASETS,
    *(PartSpec(("data", split, "transforms", "*"), "transform", "name", schema.TransformPart) for split in _SPLITS),
    PartSpec(("losses", "*"), "loss", "name", schema.LossPart),
    PartSpec(("optimizer",), "optimizer", "name", schema.OptimizerPart),
    PartSpec(("schedule",), "schedule", "decay", schema.SchedulePart),
    PartSpec(("schedule", "momentum"), "schedule", "decay", schema.TransitionPart),
    PartSpec(("schedule", "weight_decay"), "schedule", "decay", schema.TransitionPart),
    PartSpec(("train", "averaging"), "averaging", "name", schema.AveragingPart),
    PartSpec(("train", "strategy"), "strategy", "name", schema.StrategyPart),
    PartSpec(("train", "activation_checkpointing"), "activation_checkpointing", "name", schema.CheckpointingPart),
    PartSpec(("evaluate", "metrics", "*"), "metric", "name", schema.MetricPart),
]
