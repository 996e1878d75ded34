"""`paceline convert FILE.yaml` or `FILE.json`: convert the configuration of another program to a recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from paceline.commands.common import print_json
from paceline.core.atomic_write import replace_file
from paceline.core.errors import UsageError
from paceline.recipe.dali_config import convert_dali_config, is_dali_config
from paceline.recipe.document import parse_value, read_document
from paceline.recipe.foreign_config import ForeignConfig
from paceline.recipe.load import expand_shorthand
from paceline.recipe.parts import PARTS
from paceline.recipe.pet_config import convert_pet_config, is_pet_config
from paceline.recipe.validate import validate

_CONVERTERS = [(is_pet_config, convert_pet_config), (is_dali_config, convert_dali_config)]


def main(options: argparse.Namespace) -> int:
    """Print the recipe or write it to `--out`; remarks on what changed or was left out are at its top."""
    recipe, remarks = convert_config(options.file)
    recipe = json.loads(json.dumps(recipe))  # a list that two splits share would be written as a YAML alias
    text = yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    document = parse_value(text, str(options.file))
    expand_shorthand(document, PARTS)
    validate(document)
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
    """The recipe of a configuration file, and what changed or was left out, each with its line."""
    document = read_document(file)
    config = ForeignConfig(document)
    for is_known, convert in _CONVERTERS:
        if is_known(document.tree):
            return convert(config), config.remarks()
    raise UsageError(
        f"{file}: neither a configuration of Pet (SOLVER: …) nor one of PytorchTrainAcceleration "
        "(dataset, model, optimizer, train); docs/coming-from has a table for other programs"
    )
