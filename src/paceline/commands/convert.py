"""`paceline convert`: convert a weights file to safetensors, or the configuration of another program to a recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.commands.common import add_json, print_json
from paceline.core.atomic_write import replace_file
from paceline.core.errors import UsageError
from paceline.core.text import pluralize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to read; nothing in it is executed")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: FILE with the extension .safetensors; a recipe is printed"
    )
    parser.add_argument("--key", help="where the file holds the tensors, such as net_state (default: the usual keys)")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), help="round float tensors to half precision")
    parser.add_argument("--max-gb", type=float, default=20.0, metavar="N", help="refuse larger files (default: 20)")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Convert a configuration file, by its extension; else write tensors beside the file or to `--out`."""
    from paceline.recipe.document import SUFFIXES

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
    import yaml

    from paceline.convert.convert_config import convert_config

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
