"""`paceline recipes`: list the recipes that ship with the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.commands.common import add_json, print_json
from paceline.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe (default: list all)")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Print one recipe, or list every recipe with its task, expected metrics and description."""
    from paceline.recipe.load import load, shipped_recipes
    from paceline.recipe.validate import validate

    if options.name is not None:
        return _print_recipe(options.name, options.json)
    recipes = {name: validate(load(name)).recipe for name in shipped_recipes()}
    about = {name: _about(path) for name, path in shipped_recipes().items()}
    if options.json:
        found = [
            {"name": name, "task": recipe.task.name, "expect": recipe.expect, "about": about[name]}
            for name, recipe in recipes.items()
        ]
        print_json({"recipes": found})
        return 0
    width, task_width = max(map(len, recipes)), max(len(each.task.name) for each in recipes.values())
    for name, recipe in recipes.items():
        expected = ", ".join(f"{metric} {value:g}" for metric, value in recipe.expect.items())
        print(f"{name:<{width}}  {recipe.task.name:<{task_width}}  {expected:<30}  {about[name]}")
    return 0


def _print_recipe(name: str, as_json: bool) -> int:
    from paceline.recipe.load import find_recipe, shipped_recipes

    path, _ = find_recipe(name)
    if path not in shipped_recipes().values():
        raise UsageError(f"{name}: is a file of yours; expected the name of a recipe that ships with paceline")
    text = path.read_text(encoding="utf-8")
    if as_json:
        print_json({"name": name, "path": str(path), "text": text})
    else:
        print(text, end="")
    return 0


def _about(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("#").strip()
