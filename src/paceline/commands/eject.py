"""`paceline eject`: write a run as a Python file that constructs every part itself."""

from __future__ import annotations

import argparse
import shlex
import sys

from paceline.commands.common import read_recipe
from paceline.commands.show import build_assumed


def main(options: argparse.Namespace) -> int:
    """Print the Python file."""
    checked = read_recipe(options)
    builder, run, missing = build_assumed(checked)
    from paceline.commands.ejected_file import EjectedFile

    lines = EjectedFile(builder, run).lines(shlex.join(["paceline", *options.arguments]))
    for note in missing:
        print(f"warning: {note}", file=sys.stderr)
    print("\n".join(lines))
    return 0
