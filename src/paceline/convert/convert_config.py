"""Convert the configuration of another program to a recipe, by what the file holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.convert.dali_config import Dali, convert_dali_config, is_dali_config
from paceline.convert.foreign_config import ForeignConfig
from paceline.convert.pet_config import Pet, convert_pet_config, is_pet_config
from paceline.convert.yolo_data import YoloData, convert_yolo_data, is_yolo_data
from paceline.core.arguments import Arguments
from paceline.core.errors import UsageError
from paceline.recipe.document import read_document
from paceline.recipe.validate import validate

_CONVERTERS: list[tuple[Callable[..., bool], type[Arguments], Callable[..., dict[str, Any]]]] = [
    (is_pet_config, Pet, convert_pet_config),
    (is_dali_config, Dali, convert_dali_config),
    (is_yolo_data, YoloData, convert_yolo_data),
]


def convert_config(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The valid recipe of a configuration file, and what changed or was left out, each with its line."""
    document = read_document(file, any_keys=True)
    for is_known, section, convert in _CONVERTERS:
        if is_known(document.tree):
            config = ForeignConfig(document, section)
            recipe = convert(config)
            validate(config.document(recipe))
            return recipe, config.remarks()
    raise UsageError(
        f"{file}: neither a configuration of Pet (SOLVER: …) nor one of PytorchTrainAcceleration (dataset, model, "
        "optimizer, train) nor a YOLO data set (train, val, names); docs/coming-from has a table for other programs"
    )
