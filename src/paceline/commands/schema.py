"""`paceline schema`: print the JSON Schema of recipes."""

from __future__ import annotations

import argparse

from paceline.commands.common import print_json
from paceline.recipe.json_schema import json_schema


def main(options: argparse.Namespace) -> int:
    """Print the schema."""
    print_json(json_schema())
    return 0
