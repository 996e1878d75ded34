"""`paceline convert FILE.yaml` or `FILE.json`: convert the configuration of another program to a recipe."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from paceline.commands.common import print_json
from paceline.core.arguments import Arguments
from paceline.core.atomic_write import replace_file
from paceline.core.errors import UsageError
from paceline.recipe.dali_config import Dali, convert_dali_config, is_dali_config
from paceline.recipe.document import read_document
from paceline.recipe.foreign_config import ForeignConfig
from paceline.recipe.pet_config import Pet, convert_pet_config, is_pet_config
from paceline.recipe.validate import validate

_CONVERTERS: list[tuple[Callable[..., bool], type[Arguments], Callable[..., dict[str, Any]]]] = [
    (is_pet_config, Pet, convert_pet_config),
    (is_dali_config, Dali, convert_dali_config),
]


def main(options: argparse.Namespace) -> int:
    """Print the recipe or write it to `--out`; remarks on what changed or was left out are at its top."""
    recipe, remarks = convert_config(options.file)
    recipe = json.loads(json.dumps(recipe))  # a list that two splits share would be written as a YAML alias
    text = yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    written = "".join(f"# {line}\n" for line in [f"Converted from {options.file}.", *remarks]) + text
    if options.out:
        replace_file(options.out, written.encode())
    if options.json:
        print_json({"file": str(options.file), "recipe": recipe, "remarks": remarks})
    elif options.out:
        print("".join(f"{line}\n" for line in [*remarks, f"{options.out}: a valid recipe"]), end="")
    else:
        print(written, end="")
    return 0


def convert_config(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The valid recipe of a configuration file, and what changed or was left out, each with its line."""
    document = read_document(file)
    for is_known, section, convert in _CONVERTERS:
        if is_known(document.tree):
            config = ForeignConfig(document, section)
            recipe = convert(config)
            validate(config.document(recipe))
            return recipe, config.remarks()
    raise UsageError(
        f"{file}: neither a configuration of Pet (SOLVER: …) nor one of PytorchTrainAcceleration "
        "(dataset, model, optimizer, train); docs/coming-from has a table for other programs"
    )
