"""`paceline schema`: print the JSON Schema of recipes."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""


def main(options: argparse.Namespace) -> int:
    """Print the schema."""
    from paceline.recipe.json_schema import json_schema

    print(json.dumps(json_schema(), ensure_ascii=False))
    return 0
