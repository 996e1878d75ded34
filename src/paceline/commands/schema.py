"""`paceline schema`: print the JSON Schema of recipes."""

from __future__ import annotations

import argparse
import json

from paceline.recipe.json_schema import json_schema, reference


def main(options: argparse.Namespace) -> int:
    """Print the schema, or the same as a page for readers."""
    print(reference().rstrip() if options.markdown else json.dumps(json_schema(), ensure_ascii=False))
    return 0
