"""`paceline convert`: convert a weights file to safetensors, or the configuration of another program to a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.commands import convert_config
from paceline.commands.common import print_json
from paceline.core.errors import UsageError
from paceline.core.text import pluralize
from paceline.recipe.document import SUFFIXES


def main(options: argparse.Namespace) -> int:
    """Convert a configuration file, by its extension; else write tensors beside the file or to `--out`."""
    if options.file.suffix.lower() in SUFFIXES:
        return convert_config.main(options)
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
