"""Writes the registry's table, `registry.json`, from what the package registers.

`python -m paceline.core.table`, after a signature, a name or the version of a library has changed.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from typing import Any

from paceline.core.registry import KINDS, TABLE, Row, register


def collect() -> dict[str, dict[str, Row]]:
    """Each kind's names, sorted, as the code and the installed libraries have them."""
    for module in pkgutil.walk_packages([str(TABLE.parent)], "paceline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    table: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for (kind, name), definition in sorted(register.definitions.items()):
        table[kind][name] = definition.row()
    return table


def as_text(table: Mapping[str, Mapping[str, Row]]) -> str:
    """The table as JSON with a line for each name."""
    kinds = []
    for kind, rows in table.items():
        lines = [f"{json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in rows.items()]
        kinds.append(f'"{kind}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(as_text(collect()), encoding="utf-8")
