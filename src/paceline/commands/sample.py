"""`paceline sample`: a small data set to try a task with, and what to write in a recipe to use it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from pathlib import Path

from paceline.core.errors import UsageError

_NORMALIZE = "{name: normalize, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}"
_LAYOUTS = {
    "saliency": """\
task: saliency
data:
  batch: 8
  train:
    dataset: image_mask
    root: ROOT
    list_file: train.txt
    binary: true
    transforms:
      - {name: resize, size: [128, 128]}
      - {name: flip}
      - NORMALIZE
  val:
    dataset: image_mask
    root: ROOT
    list_file: val.txt
    binary: true
    transforms:
      - keep_truth
      - {name: resize, size: [128, 128]}
      - NORMALIZE
""",
    "segmentation": """\
task: segmentation
data:
  batch: 8
  train:
    dataset: image_mask
    root: ROOT
    list_file: train.txt
    classes: [ground, disc, square, triangle]
    ignore_index: 255
    transforms:
      - {name: flip}
      - NORMALIZE
  val:
    dataset: image_mask
    root: ROOT
    list_file: val.txt
    classes: [ground, disc, square, triangle]
    ignore_index: 255
    transforms:
      - NORMALIZE
""",
    "video": """\
task: video
data:
  batch: 8
  train:
    dataset: video_list
    file: ROOT/train.csv
    classes: [circling, growing, sideways, vertical]
    transforms:
      - {name: clip, frames: 8, stride: 3}
      - {name: random_fixed_crop, size: [72, 104]}
      - NORMALIZE
  val:
    dataset: video_list
    file: ROOT/val.csv
    classes: [circling, growing, sideways, vertical]
    transforms:
      - {name: multi_clip, clips: 2, frames: 8, stride: 3}
      - {name: multi_crop, size: 72, crops: 3}
      - NORMALIZE
""",
}


def main(options: argparse.Namespace) -> int:
    """Write the data set, all of it or nothing, and print the sections of a recipe and a command that read it."""
    if options.number < 2:
        raise UsageError(f"--number {options.number}: expected 2 or more, one of which is kept for val")
    if options.seed < 0:
        raise UsageError(f"--seed {options.seed}: expected a number from 0 up")
    folder: Path = options.folder
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty, and nothing in it is overwritten: name a new folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a new folder")
    try:
        _write(options.kind, folder.absolute(), options.number, options.seed)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}; name another folder") from error
    print(_snippet(options.kind, folder.absolute()), end="")
    print(f"# A whole recipe for it ships:\n#   {_command(options.kind, folder.absolute())}")
    return 0


def _write(kind: str, folder: Path, number: int, seed: int) -> None:
    from paceline.data.synthetic import write_saliency, write_segmentation, write_video

    write = {"saliency": write_saliency, "segmentation": write_segmentation, "video": write_video}[kind]
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    aside.mkdir()
    try:
        write(aside, number, seed)
        aside.rename(folder)  # onto an empty folder at most
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _snippet(kind: str, folder: Path) -> str:
    text = _LAYOUTS[kind].replace("NORMALIZE", _NORMALIZE)
    for ending in ("/train.csv", "/val.csv", ""):
        text = text.replace(f"ROOT{ending}", json.dumps(f"{folder}{ending}", ensure_ascii=False))
    return text


def _command(kind: str, folder: Path) -> str:
    """The command that trains on the set; it is short where the recipe that ships looks for it."""
    recipe = f"{kind}_sample"
    command = ["paceline", "train", recipe]
    if folder not in (Path.cwd() / "data" / recipe, Path.cwd() / recipe):
        key, endings = ("file", ("/train.csv", "/val.csv")) if kind == "video" else ("root", ("", ""))
        for split, ending in zip(("train", "val"), endings, strict=True):
            command.append(f"data.{split}.{key}={json.dumps(f'{folder}{ending}', ensure_ascii=False)}")
    return shlex.join(command)
