"""`paceline convert`: convert a weights file to safetensors, or the configuration of another program to a recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from paceline.commands.common import print_json
from paceline.convert.convert_config import convert_config
from paceline.core.atomic_write import replace_file
from paceline.core.errors import UsageError
from paceline.core.text import pluralize
from paceline.recipe.document import SUFFIXES


def main(options: argparse.Namespace) -> int:
    """Convert a configuration file, by its extension; else write tensors beside the file or to `--out`."""
    if options.file.suffix.lower() in SUFFIXES:
        return _convert_config(options)
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


def _convert_config(options: argparse.Namespace) -> int:
    """Print the recipe or write it to `--out`; remarks on what changed or was left out are at its top."""
    recipe, remarks = convert_config(options.file)
    recipe = json.loads(json.dumps(recipe))  # a list that two splits share would be written as a YAML alias
    text = yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    written = "".join(f"# {line}\n" for line in [f"Converted from {options.file}.", *remarks]) + text
    if options.out:
        replace_file(options.out, written.encode())
    if options.json:
        print_json({"file": str(options.file), "recipe": recipe, "remarks": remarks})
    elif options.out:
        print("".join(f"{line}\n" for line in [*remarks, f"{options.out}: a valid recipe"]), end="")
    else:
        print(written, end="")
    return 0
