"""`python -m chaos [NAME …] [--quick]`: try what can go wrong, print a table, and after a full run write it down."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from chaos.row import PAGE, Row, table, write


def modules() -> list[str]:
    """The modules of this package that try something: those with a function `run(quick)`, which gives rows."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if "\ndef run(quick: bool) -> list[Row]:" in file.read_text(encoding="utf-8")]


def main() -> int:
    """Run the trials that are asked for, or all of them; 1 if one did not come out as promised."""
    names = modules()
    parser = argparse.ArgumentParser("chaos", description="What Paceline promises, tried.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few cases: to see that it works, not to quote")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"no trial is called {unknown[0]}; there are {', '.join(names)}")
    rows: list[Row] = []
    for name in options.names or names:
        started = time.monotonic()
        found = importlib.import_module(f"chaos.{name}").run(options.quick)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        rows += found
        if not options.quick:
            write(found)  # at once, since a run takes long and may be cut short
    print(table(rows))
    if options.quick:
        print(f"{PAGE} is left as it is by a quick run")
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
