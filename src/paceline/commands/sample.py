"""`paceline sample`: write a small synthetic data set and print a recipe for it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import UsageError

TASKS = ("classification", "detection", "instance_segmentation", "keypoints", "saliency", "segmentation", "video")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("kind", choices=TASKS, help="the task")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--number", type=int, default=64, metavar="N", help="number of samples (default: 64)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")


def main(options: argparse.Namespace) -> int:
    """Write the data set completely or not at all, and print recipe sections and a command for it."""
    if options.number < 2:
        raise UsageError(f"--number {options.number}: expected 2 or more; at least one is for val")
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: expected a number ≥ 0")
    folder: Path = options.folder
    create_folder(folder, lambda new: write_samples(options.kind, new, options.number, options.seed))
    print(_snippet(options.kind, folder.absolute()), end="")
    print(f"# A complete recipe ships with the package:\n#   {_command(options.kind, folder.absolute())}")
    return 0


def create_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create a folder with what `fill` writes into it, completely or not at all; one that is not empty is refused."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; choose a new folder")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; choose a new folder")
        place = folder.absolute()
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f".{place.name}.{os.getpid()}.partial")
        aside.mkdir()
        try:
            fill(aside)
            aside.rename(place)  # onto an empty folder at most
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}; choose another folder") from error


def write_samples(kind: str, folder: Path, number: int, seed: int) -> None:
    """Write a synthetic data set for a task into an empty folder."""
    from paceline.data import synthetic

    write = {
        "classification": synthetic.write_classification,
        "detection": synthetic.write_detection,
        "instance_segmentation": synthetic.write_instance_segmentation,
        "keypoints": synthetic.write_keypoints,
        "saliency": synthetic.write_saliency,
        "segmentation": synthetic.write_segmentation,
        "video": synthetic.write_video,
    }[kind]
    write(folder, number, seed)


def _snippet(kind: str, folder: Path) -> str:
    """The data sections of the shipped recipe, with their paths."""
    from paceline.recipe.load import shipped_recipes

    text = shipped_recipes()[f"{kind}_sample"].read_text(encoding="utf-8")
    data = text[text.index("\ndata:\n") :].partition("\n\n")[0]
    placed = re.sub(rf"\b{kind}_sample(\S*)", lambda found: json.dumps(f"{folder}{found[1]}", ensure_ascii=False), data)
    return f"task: {kind}{placed}\n"


def _command(kind: str, folder: Path) -> str:
    """The command that trains on the data set; short if the shipped recipe finds it."""
    recipe = f"{kind}_sample"
    command = ["paceline", "train", recipe]
    if folder not in (Path.cwd() / "data" / recipe, Path.cwd() / recipe):
        key, files = ("file", ("/train.csv", "/val.csv")) if kind == "video" else ("root", ("", ""))
        for split, file in zip(("train", "val"), files, strict=True):
            command.append(f"data.{split}.{key}={json.dumps(f'{folder}{file}', ensure_ascii=False)}")
    return shlex.join(command)
