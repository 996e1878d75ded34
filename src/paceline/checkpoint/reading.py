"""Finding checkpoints and opening them: nothing is returned that was not verified."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.folder import MANIFEST, read_content, read_manifest, verify
from paceline.checkpoint.state import Tree
from paceline.core.errors import CheckpointError

_STEP = re.compile(r"(step-\d{8,})|\.(step-\d{8,})\.replaced")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory; `rejected` tells of newer ones that were damaged."""

    path: Path
    step: int
    model: dict[str, Tensor]
    state: Tree
    figures: dict[str, float]
    rejected: tuple[str, ...] = ()


def folder_name(step: int) -> str:
    """What the folder of a step is called."""
    if step < 0:
        raise ValueError(f"a step is counted from 0, found {step}")
    return f"step-{step:08d}"


def open_checkpoint(path: Path) -> Checkpoint:
    """A verified checkpoint from a step folder, a `best` link or a run directory (its newest valid one)."""
    if not path.exists():
        what = f"links to {path.readlink()}, which does not exist" if path.is_symlink() else "does not exist"
        raise CheckpointError(f"{path}: {what}; expected a run directory or one of its checkpoints")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is a file; expected a run directory or one of its checkpoints")
    if (path / MANIFEST).exists():
        return _read(path.resolve())
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoint, rejected = newest_in(root)
    if checkpoint is None and rejected:
        raise CheckpointError("\n".join([f"{path}: none of its checkpoints is whole:", *rejected]))
    if checkpoint is None:
        raise CheckpointError(f"{path}: holds no checkpoint: found neither {MANIFEST} nor a step-… folder")
    return checkpoint


def newest_in(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint in a folder of them that verifies, and what is wrong with newer ones."""
    rejected: list[str] = []
    for step, path in reversed(step_folders(root)):
        try:
            found = read_manifest(path).step
            if found != step:
                raise CheckpointError(f"{path / MANIFEST}: expected step {step}, found {found}")
            return _read(path, rejected), rejected
        except CheckpointError as error:
            rejected.append(str(error))
    return None, rejected


def _read(path: Path, rejected: list[str] | None = None) -> Checkpoint:
    manifest = verify(path)
    model, state = read_content(path, manifest)
    return Checkpoint(path, manifest.step, model, state, manifest.figures, tuple(rejected or ()))


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Step folders by step; one moved aside by a replacement that was cut short still counts."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            # Sorting puts the ones moved aside first, so a folder in its place wins.
            found[int((match[1] or match[2]).removeprefix("step-"))] = path
    return sorted(found.items())
