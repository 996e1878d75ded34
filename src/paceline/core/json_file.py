"""Small JSON files that may hold anything by now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.core.regular_file import open_regular

_LONGEST = 1 << 16


def read_json(path: Path) -> Any:
    """The content of a small JSON file; None if it is not there, is no regular file, or is damaged."""
    try:
        with open_regular(path) as file:
            content = file.read(_LONGEST + 1)
        return json.loads(content) if len(content) <= _LONGEST else None
    except (OSError, ValueError, RecursionError):
        return None
