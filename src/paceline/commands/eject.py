"""`paceline eject`: write a run as a Python file that constructs every part itself."""

from __future__ import annotations

import argparse
import shlex
import sys

from paceline.commands.common import add_recipe, read_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe(parser)


def main(options: argparse.Namespace) -> int:
    """Print the Python file."""
    checked = read_recipe(options)
    from paceline.commands.ejected_file import EjectedFile
    from paceline.commands.show import build_assumed

    builder, run, missing = build_assumed(checked)
    lines = EjectedFile(checked.recipe, builder, run).lines(shlex.join(["paceline", *options.arguments]))
    for note in missing:
        print(f"warning: {note}", file=sys.stderr)
    print("\n".join(lines))
    return 0
