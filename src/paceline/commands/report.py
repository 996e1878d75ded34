"""`paceline report`: one HTML page on a run, or on several that are compared."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.core.errors import UsageError
from paceline.core.text import pluralize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs, or folders of them")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="an .html file (default: RUN/report.html, of several runs report.html)"
    )


def main(options: argparse.Namespace) -> int:
    """Write the page."""
    from paceline.report.page import write_report
    from paceline.report.run_folders import find_runs

    folders = [folder for folder, _ in find_runs(options.runs)]
    out = options.out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: expected a file that ends in .html")
    try:
        write_report(folders, out)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}; choose another file with --out") from error
    print(f"{pluralize(len(folders), 'run')} in {out}")
    for folder in folders:
        if not (folder / "metrics.jsonl").is_file():
            print(f"{folder} has logged nothing yet: write the report again later", file=sys.stderr)
    return 0
