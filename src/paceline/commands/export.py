"""`paceline export`: a trained model as files for other programs, each checked against the model on real samples."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.commands.common import add_json, add_trained_run, print_json, print_notes
from paceline.core.errors import UsageError, missing_extra
from paceline.core.text import pluralize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    formats = ("safetensors", "pt2", "onnx")
    add_trained_run(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where files are written (default: RUN/export)")
    parser.add_argument("--format", nargs="+", choices=formats, help="which files are written (default: all)")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "bf16"),
        default="fp32",
        help="of the weights in model.safetensors (default: fp32); graphs are always fp32",
    )
    parser.add_argument(
        "--input",
        choices=("normalized", "float", "uint8"),
        default="normalized",
        help="what graphs take: normalized images (default), or pixels from 0 to 1 or of uint8, normalized inside",
    )
    parser.add_argument(
        "--samples", type=Path, nargs="+", metavar="INPUT", help="what files are checked on (default: the run's data)"
    )
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    """Export the model, and print what was written and how much it differs from the model."""
    from paceline.recipe.load import run_recipe

    run_recipe(options.run)  # where there is none, that is known before torch is loaded
    out: Path = options.out or options.run / "export"
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: expected a folder, found a file")

    from paceline.checkpoint.weights import DTYPES
    from paceline.engine.export import ExportOptions
    from paceline.recipe.build_predictor import EXPORT, build_predictor, check_run

    reason = missing_extra("onnx")
    if reason and "onnx" in (options.format or ()):
        raise UsageError(f"--format onnx: {reason}, or choose other formats")
    formats = options.format or [each for each in ExportOptions().formats if each != "onnx" or not reason]
    left_out = {"onnx": reason} if reason and not options.format else {}
    checked = check_run(options.run, options.use, overrides=EXPORT)
    print_notes(checked.notes)
    predictor = build_predictor(checked, options.run, options.checkpoint, options.average)
    wanted = ExportOptions(tuple(dict.fromkeys(formats)), DTYPES.get(options.dtype), options.input)
    files = predictor.export(out, wanted, options.samples)
    print(f"step {predictor.checkpoint.step}, {predictor.checkpoint.path}", file=sys.stderr)
    for name, why in left_out.items():
        print(f"model.{name} is left out: {why}", file=sys.stderr)
    if options.json:
        keys = ("size", "num_samples", "max_difference")
        written = {str(each.path): {key: getattr(each, key) for key in keys} for each in files}
        print_json({"out": str(out), "files": written, "left_out": left_out})
        return 0
    for each in files:
        samples = pluralize(each.num_samples, "sample")
        print(f"{each.path}: {each.size:,} bytes, differs by at most {each.max_difference:.2g} on {samples}")
    print(f"{out / 'preprocessing.json'}: how to prepare images")
    return 0
