"""`paceline report`: one HTML page on a run, or on several that are compared."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.core.errors import UsageError
from paceline.core.place import LAST_PORT
from paceline.core.text import pluralize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs, or folders of them")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="an .html file (default: RUN/report.html, of several runs report.html)"
    )
    parser.add_argument("--serve", action="store_true", help="serve the page on this machine and keep it up to date")
    parser.add_argument("--port", type=int, metavar="N", help="for --serve (default: any free one)")


def main(options: argparse.Namespace) -> int:
    """Write the page, or serve it until interrupted."""
    from paceline.report.page import write_report
    from paceline.report.run_folders import find_runs
    from paceline.report.server import serve

    folders = [folder for folder, _ in find_runs(options.runs)]
    if options.serve:
        _check_serve(options)
        serve(folders, options.port or 0)
        return 0
    if options.port is not None:
        raise UsageError("--port is for --serve: add --serve, or leave --port away")
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
            hint = "write the report again later, or watch it with --serve"
            print(f"{folder} has logged nothing yet: {hint}", file=sys.stderr)
    return 0


def _check_serve(options: argparse.Namespace) -> None:
    if options.out is not None:
        raise UsageError("--out is incompatible with --serve, which writes no file: leave one of them away")
    if options.port is not None and not 0 <= options.port <= LAST_PORT:
        raise UsageError(f"--port {options.port}: expected a number from 0 to {LAST_PORT}")
