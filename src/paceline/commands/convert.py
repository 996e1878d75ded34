"""`paceline convert`: convert a weights file to safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.checkpoint.weights import DTYPES, convert
from paceline.commands.common import print_json
from paceline.core.errors import UsageError
from paceline.core.text import pluralize


def main(options: argparse.Namespace) -> int:
    """Write the tensors beside the file or to `--out`, and print their number."""
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
