"""`paceline schema`: print the JSON Schema of recipes."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--markdown", action="store_true", help="print a page for readers instead")


def main(options: argparse.Namespace) -> int:
    """Print the schema, or the same as a page for readers."""
    from paceline.recipe.json_schema import json_schema, reference

    print(reference().rstrip() if options.markdown else json.dumps(json_schema(), ensure_ascii=False))
    return 0
