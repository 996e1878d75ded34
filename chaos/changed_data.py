"""A run continued on other data than it began with: every kind of change is refused, and what is the same is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from chaos.row import Row

Change = Callable[[Path], object]
"""Changes the data in a folder, which holds `train`, `val` and `labels.csv`."""
_CLASSES = ("cat", "dog", "owl")


def make(folder: Path) -> None:
    """A folder of images by class for each split, and a list of the same images with their labels."""
    generator = np.random.default_rng(0)
    for split, number in (("train", 9), ("val", 3)):
        for name in _CLASSES:
            (folder / split / name).mkdir(parents=True)
            for index in range(number):
                paint(folder / split / name / f"{name}{index}.png", generator)
    images = sorted((folder / "train").glob("*/*.png"))
    lines = [f"{path.relative_to(folder).as_posix()},{path.parent.name}\n" for path in images]
    (folder / "labels.csv").write_text("".join(lines))


def paint(path: Path, generator: np.random.Generator, size: int = 20) -> None:
    """An image of noise."""
    cv2.imwrite(str(path), generator.integers(0, 255, (size, size, 3), dtype=np.uint8))


def recipe(dataset: str, steps: int) -> dict[str, Any]:
    """A recipe that learns from the folder, or from the list; 7 updates are an epoch."""
    resize = [{"name": "resize", "size": [16, 16]}]
    train = {"dataset": "image_folder", "root": "data/train"}
    if dataset == "list_file":
        train = {"dataset": "list_file", "file": "data/labels.csv"}
    val = {"dataset": "image_folder", "root": "data/val"}
    return {
        "name": "changed",
        "task": "classification",
        "model": {"name": "convnet", "widths": [4]},
        "data": {
            "batch_size": 4,
            "num_workers": 0,
            "train": {**train, "transforms": resize},
            "val": {**val, "transforms": resize},
        },
        "losses": ["cross_entropy"],
        "optimizer": {"name": "sgd", "lr": 0.1},
        "train": {"steps": steps},
        "checkpoint": {"every_steps": 4},
        "logging": {"images": False, "tensorboard": False},
    }


def _replace(path: Path) -> None:
    paint(path, np.random.default_rng(1), 24)


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink()


def _lose_owls(data: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(data / split / "owl")


def _touch(data: Path) -> None:
    for path in data.rglob("*"):
        os.utime(path)


def _replace_by_copy(data: Path) -> None:
    shutil.copytree(data, data.with_name("copy"))
    shutil.rmtree(data)
    data.with_name("copy").rename(data)


CHANGES: dict[str, tuple[str, Change, str]] = {
    "a class renamed in both splits": (
        "image_folder",
        lambda data: [(data / split / "cat").rename(data / split / "zebra") for split in ("train", "val")],
        "zebra",
    ),
    "a class renamed in one split": (
        "image_folder",
        lambda data: (data / "train/cat").rename(data / "train/zebra"),
        "zebra",
    ),
    "a class more": (
        "image_folder",
        lambda data: [shutil.copytree(data / split / "owl", data / split / "wolf") for split in ("train", "val")],
        "wolf",
    ),
    "a class less": (
        "image_folder",
        _lose_owls,
        "owl",
    ),
    "two classes exchanged": (
        "image_folder",
        lambda data: _swap(data / "train/cat", data / "train/dog"),
        "train: `cat`",
    ),
    "images removed": (
        "image_folder",
        lambda data: _remove([data / f"train/dog/dog{number}.png" for number in (1, 4, 7)]),
        "27 samples became 24",
    ),
    "images added": (
        "image_folder",
        lambda data: [
            shutil.copy(path, path.with_name(f"more-{path.name}")) for path in (data / "train/owl").glob("*.png")
        ],
        "27 samples became 36",
    ),
    "images removed and as many added": (
        "image_folder",
        lambda data: (data / "train/dog/dog3.png").rename(data / "train/dog/later.png"),
        "train: `dog`",
    ),
    "another image in place of one": ("image_folder", lambda data: _replace(data / "train/owl/owl5.png"), "`owl`"),
    "an image cut short": ("image_folder", lambda data: os.truncate(data / "train/cat/cat2.png", 100), "`cat`"),
    "a set a third as large": (
        "image_folder",
        lambda data: _remove([path for path in (data / "train").glob("*/*.png") if path.stem[-1] not in "147"]),
        "27 samples became 9",
    ),
    "images of the validation split removed": (
        "image_folder",
        lambda data: (data / "val/cat/cat1.png").unlink(),
        "val: 9 samples became 8",
    ),
    "a label changed in a list": (
        "list_file",
        lambda data: _edit(data / "labels.csv", lambda lines: [lines[0].replace(",cat", ",dog"), *lines[1:]]),
        "labels.csv",
    ),
    "a list in another order": (
        "list_file",
        lambda data: _edit(data / "labels.csv", lambda lines: [*lines[9:], *lines[:9]]),
        "labels.csv",
    ),
    "a list cut short": (
        "list_file",
        lambda data: _edit(data / "labels.csv", lambda lines: lines[:-2]),
        "27 samples became 25",
    ),
}
"""Each with the data set that reads it, and a word that the refusal must hold."""

SAME: dict[str, tuple[str, Change]] = {
    "nothing": ("image_folder", lambda data: None),
    "times of change": ("image_folder", _touch),
    "a copy in its place": (
        "image_folder",
        _replace_by_copy,
    ),
    "notes beside the images": ("image_folder", lambda data: (data / "train/cat/notes.txt").write_text("mine")),
}
"""What is no change."""


def run(quick: bool) -> list[Row]:
    """Every change, and what is none, with the command itself."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for dataset in ("image_folder", "list_file"):
            _begin(home / dataset, dataset)
        changes = list(CHANGES.items())[: 3 if quick else None]
        problems = [_refused(home, f"changed-{number}", *case) for number, (_, case) in enumerate(changes)]
        same = list(SAME.items())[: 1 if quick else None]
        problems += [_continued(home, f"same-{number}", *case) for number, (_, case) in enumerate(same)]
    found = [problem for problem in problems if problem]
    print("\n".join(found))
    refused = len(changes) - sum(bool(problem) for problem in problems[: len(changes)])
    return [
        Row(
            "a run continued on other data than it began with",
            "each kind of change refused with exit 3 and named; the same data elsewhere goes on",
            f"{refused}/{len(changes)} refused, {len(problems) - len(found) - refused}/{len(same)} went on",
            not found,
        )
    ]


def _begin(folder: Path, dataset: str) -> None:
    folder.mkdir()
    make(folder / "data")
    done = _train(folder, dataset, 4)
    if done.returncode != 0:
        raise RuntimeError(f"the run did not begin: {done.stderr}")


def _train(folder: Path, dataset: str, steps: int, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "recipe.json").write_text(json.dumps(recipe(dataset, steps)))
    command = [sys.executable, "-m", "paceline", "train", "recipe.json", "--procs", "1", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def _refused(home: Path, name: str, dataset: str, change: Change, word: str) -> str | None:
    folder = Path(shutil.copytree(home / dataset, home / name, symlinks=True))
    change(folder / "data")
    done = _train(folder, dataset, 8)
    if done.returncode != 3 or word not in done.stderr:
        return f"{name}: ended with {done.returncode}, expected 3 and {word!r}: {done.stderr[-500:]}"
    return None


def _continued(home: Path, name: str, dataset: str, change: Change) -> str | None:
    folder = Path(shutil.copytree(home / dataset, home / name, symlinks=True))
    change(folder / "data")
    done = _train(folder, dataset, 8)
    return f"{name}: ended with {done.returncode}: {done.stderr[-500:]}" if done.returncode else None
