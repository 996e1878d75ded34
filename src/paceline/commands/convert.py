"""`paceline convert`: convert a weights file to safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.commands.common import add_json, print_json
from paceline.core.errors import UsageError
from paceline.core.text import pluralize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to read; nothing in it is executed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: FILE with the extension .safetensors")
    parser.add_argument("--key", help="where the file holds the tensors, such as net_state (default: the usual keys)")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), help="round float tensors to half precision")
    parser.add_argument("--max-gb", type=float, default=20.0, metavar="N", help="refuse larger files (default: 20)")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Write the tensors beside the file or to `--out`."""
    from paceline.checkpoint.weights import DTYPES, convert

    if not options.max_gb > 0:
        raise UsageError(f"--max-gb: expected a number above 0, got {options.max_gb:g}")
    out: Path = options.out or options.file.with_suffix(".safetensors")
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    converted = convert(options.file, out, int(options.max_gb * 1e9), options.key, dtype)
    if options.json:
        print_json(
            {"file": str(options.file), "out": str(out), "tensors": converted.num_tensors, "bytes": converted.size}
        )
    else:
        print(f"{out}: {pluralize(converted.num_tensors, 'tensor')}, {converted.size:,} bytes")
    return 0
