"""Pipes, devices and indexes of somebody else's in the place of data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

from chaos.hostile_files.case import Cases
from chaos.hostile_files.commands import check, check_image
from chaos.hostile_files.images import png

case = Cases()


def check_data(**train: Any) -> list[str]:
    """The command that checks a recipe with this data set, in the folder `set`."""
    Path("set/images").mkdir(parents=True, exist_ok=True)
    Path("set/images/0.png").write_bytes(png(8, 8))
    return check(data={"train": train})


@case("a pipe as a COCO file", 3)
def _() -> list[str]:
    command = check_data(dataset="coco", root="set", annotations="all.json")
    os.mkfifo("set/all.json")
    return command


@case("an endless device as a COCO file", 3)
def _() -> list[str]:
    command = check_data(dataset="coco", root="set", annotations="all.json")
    Path("set/all.json").symlink_to("/dev/zero")
    return command


@case("a pipe as a file of keypoints", 3)
def _() -> list[str]:
    command = check_data(dataset="keypoints", root="set")
    os.mkfifo("set/joints.npy")
    return command


@case("a pipe as a list of images with keypoints", 3)
def _() -> list[str]:
    command = check_data(dataset="keypoints", root="set", file="joints.json", split="train")
    points = ", ".join(["[1, 2, 1]"] * 14)
    Path("set/joints.json").write_text(f'{{"0.png": [{points}]}}', encoding="utf-8")
    os.mkfifo("set/train.txt")
    return command


@case("a pipe as a pack", 3)
def _() -> list[str]:
    command = check_data(dataset="packed", file="set/a.pack")
    os.mkfifo("set/a.pack")
    return command


@case("an endless device as a pack", 3)
def _() -> list[str]:
    command = check_data(dataset="packed", file="set/a.pack")
    Path("set/a.pack").symlink_to("/dev/zero")
    return command


@case("a pipe as a list", 3)
def _() -> list[str]:
    command = check_data(dataset="list_file", file="set/a.csv")
    os.mkfifo("set/a.csv")
    return command


@case("an endless device as a list", 3)
def _() -> list[str]:
    command = check_data(dataset="list_file", file="set/a.csv")
    Path("set/a.csv").symlink_to("/dev/zero")
    return command


@case("a pipe as a list of a VOC split", 3)
def _() -> list[str]:
    command = check_data(dataset="voc", root="set", split="train")
    Path("set/Annotations").mkdir()
    Path("set/JPEGImages").symlink_to("images")
    Path("set/Annotations/0.xml").write_text("<annotation/>", encoding="utf-8")
    os.mkfifo("set/train.txt")
    return command


@case("an index beside the data that names a file elsewhere", 3)
def _() -> list[str]:
    """The image itself is damaged: whoever reads a sound one has followed the index."""
    import numpy as np

    from paceline.data.datasets.image_folder import ImageFolder
    from paceline.data.mapped_arrays import ArrayWriter

    command = check_image(b"no image")
    Path("secret.png").write_bytes(png(8, 8))
    with mock.patch.dict(os.environ, PACELINE_CACHE=str(Path("cache").absolute())):
        ImageFolder(Path("photos"))
    (kept,) = Path("cache").iterdir()  # which tells what it is called
    for path in (Path("photos/.paceline") / kept.name.rpartition("-")[0], Path("photos/.paceline") / kept.name):
        path.parent.mkdir(exist_ok=True)
        writer = ArrayWriter()
        writer.append("label", np.zeros(1, np.int64))
        writer.append_texts("file", [b"../secret.png"])
        writer.append_texts("watched", [])
        writer.append("watched.state", np.empty((0, 3), np.int64))
        writer.facts = {"name": path.name, "classes": ["one"], "notes": []}
        with path.open("w+b") as file:
            writer.write(file)
    return command
