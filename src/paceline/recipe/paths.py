"""Where files that a recipe names are looked for."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import DataError

DATA_VARIABLE = "PACELINE_DATA"


def find_path(written: str, recipe_folder: Path) -> Path:
    """The file or folder a recipe means: absolute, or relative to one of a few places, looked at in this order.

    The current folder, `data/` in it, the recipe's own folder, and the folder that PACELINE_DATA names.
    """
    path = Path(written).expanduser()
    places = [path] if path.is_absolute() else list(dict.fromkeys(place / path for place in _places(recipe_folder)))
    for place in places:
        if place.exists():
            return place.resolve()
    missing = "".join(f", nor does {place}" for place in places[1:])
    hint = "" if path.is_absolute() else f"; give another path, or set {DATA_VARIABLE} to the folder that holds it"
    raise DataError(f"{places[0]} does not exist{missing}{hint}")


def _places(recipe_folder: Path) -> list[Path]:
    named = os.environ.get(DATA_VARIABLE)
    return [Path(), Path("data"), recipe_folder, *([Path(named)] if named else [])]
