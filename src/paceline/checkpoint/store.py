"""The checkpoints of one run: committed by a rename, verified when opened, rotated with care."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from paceline.checkpoint import files
from paceline.checkpoint.state import Tree, flatten
from paceline.core.errors import CheckpointError

INDEX = "index.json"
_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.(step-\d{8,})\.partial")
_REPLACED = re.compile(r"\.(step-\d{8,})\.replaced")


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, and whether it is the best so far."""

    path: Path
    is_best: bool


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory; `rejected` tells of newer ones that were damaged."""

    path: Path
    step: int
    model: dict[str, Tensor]
    state: Tree
    figures: dict[str, float]
    rejected: tuple[str, ...] = ()


class Store:
    """Keeps the newest checkpoints under `root` and the best by one figure; `best` beside `root` links to it.

    Nothing is ever deleted but folders that its own index lists, and only if they hold nothing else.
    """

    def __init__(
        self,
        root: Path,
        keep_last: int = 3,
        best: str | None = None,
        direction: Literal["max", "min"] = "max",
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, found {keep_last}")
        self.root = Path(root)
        self.keep_last = keep_last
        self.best = best
        self.direction = direction
        self.link = self.root.parent / "best"
        self.rejected: list[str] = []
        self.last_step: int | None = None
        """The step saved last, or found by `newest`."""

    def save(self, step: int, model: Mapping[str, Tensor], state: Tree, figures: Mapping[str, float]) -> Saved:
        """Write a checkpoint completely or not at all, then bring `best`, rotation and index up to date."""
        content = files.Folder(step, model, state, figures)
        path = self.root / folder_name(step)
        self._refuse_obstacles(path)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._tidy()
            # Said beforehand, so that a folder committed just before a kill is known to be ours.
            self._write_index(saving=step)
            self._commit(content, path)
            best = self._link_best()
            self._rotate({step, best})
            self._write_index(saving=None)
        except OSError as error:
            needed = f"{content.size:,} bytes are needed"
            raise CheckpointError(f"{path}: saving the checkpoint failed ({needed}): {error}") from error
        self.last_step = step
        return Saved(path, is_best=best == step)

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """See `open_checkpoint`."""
        return open_checkpoint(path)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, if any; `rejected` says what is wrong with newer ones."""
        checkpoint, self.rejected = _newest_in(self.root)
        self.last_step = checkpoint.step if checkpoint else None
        return checkpoint

    def index(self) -> list[dict[str, Any]]:
        """What this store wrote and still holds, by step: {"step", "figures", "best"}."""
        manifests = self._manifests()
        best = self._best_step(manifests)
        return [{"step": m.step, "figures": m.figures, "best": m.step == best} for m in manifests]

    def _refuse_obstacles(self, path: Path) -> None:
        if self.best is not None and self.link.exists() and not self.link.is_symlink():
            raise CheckpointError(f"{self.link}: is in the way of the link to the best checkpoint; move it away")
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise CheckpointError(f"{path}: is in the way of a checkpoint; move it away")

    def _manifests(self) -> list[files.Manifest]:
        ours = self._listed_steps()
        manifests = []
        for step, path in _step_folders(self.root):
            try:
                manifest = files.read_manifest(path)
            except CheckpointError:
                continue
            if manifest.step == step and (ours is None or step in ours):
                manifests.append(manifest)
        return manifests

    def _listed_steps(self) -> set[int] | None:
        """The steps that the index calls ours, or None if there is no sound index."""
        try:
            content = files.unseal(self.root / INDEX)
            return {entry["step"] for entry in content["steps"]} | {content["saving"]}
        except (CheckpointError, KeyError, TypeError):
            return None

    def _write_index(self, saving: int | None) -> None:
        steps = flatten(self.index())[1]
        files.replace_file(self.root / INDEX, files.seal({"format": files.FORMAT, "steps": steps, "saving": saving}))

    def _best_step(self, manifests: list[files.Manifest]) -> int | None:
        figures = {m.step: m.figures.get(self.best) for m in manifests} if self.best is not None else {}
        scores = {step: x for step, x in figures.items() if isinstance(x, int | float) and not math.isnan(x)}
        if not scores:
            return None
        choose = max if self.direction == "max" else min
        return choose(scores, key=lambda step: scores[step])

    def _link_best(self) -> int | None:
        best = self._best_step(self._manifests())
        if best is not None:
            aside = self.link.with_name(".best.partial")
            aside.unlink(missing_ok=True)
            aside.symlink_to(Path(self.root.name, folder_name(best)))
            aside.replace(self.link)
            files.sync_folder(self.link.parent)
        return best

    def _commit(self, content: files.Folder, path: Path) -> None:
        partial = path.with_name(f".{path.name}.partial")
        try:
            content.write(partial)
        except BaseException:
            files.remove(partial)
            raise
        replaced = path.with_name(f".{path.name}.replaced")
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        files.sync_folder(self.root)
        if replaced.exists():
            files.retire(replaced, path)

    def _rotate(self, keep: set[int | None]) -> None:
        steps = [manifest.step for manifest in self._manifests()]
        linked = self.link.resolve().name if self.link.is_symlink() else None
        for step in steps[: -self.keep_last]:
            path = self.root / folder_name(step)
            partial = path.with_name(f".{path.name}.partial")
            if step in keep or path.name == linked or not files.holds_only_ours(path) or partial.exists():
                continue
            # Renamed first: a rotation cut short leaves nothing that looks like a checkpoint.
            path.rename(partial)
            files.remove(partial)

    def _tidy(self) -> None:
        """Finish what a killed save or rotation left half done."""
        for path in sorted(self.root.iterdir()):
            if _PARTIAL.fullmatch(path.name):
                files.remove(path)
            elif (match := _REPLACED.fullmatch(path.name)) and not path.is_symlink():
                successor = self.root / match[1]
                if successor.exists():
                    files.retire(path, successor)
                else:
                    path.rename(successor)


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
    if (path / files.MANIFEST).exists():
        return _read(path.resolve())
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoint, rejected = _newest_in(root)
    if checkpoint is None and rejected:
        raise CheckpointError("\n".join([f"{path}: none of its checkpoints is whole:", *rejected]))
    if checkpoint is None:
        raise CheckpointError(f"{path}: holds no checkpoint: found neither {files.MANIFEST} nor a step-… folder")
    return checkpoint


def _newest_in(root: Path) -> tuple[Checkpoint | None, list[str]]:
    rejected: list[str] = []
    for step, path in reversed(_step_folders(root)):
        try:
            found = files.read_manifest(path).step
            if found != step:
                raise CheckpointError(f"{path / files.MANIFEST}: expected step {step}, found {found}")
            return _read(path, rejected), rejected
        except CheckpointError as error:
            rejected.append(str(error))
    return None, rejected


def _read(path: Path, rejected: list[str] | None = None) -> Checkpoint:
    manifest = files.verify(path)
    model, state = files.read_tensors(path / files.MODEL), files.read_state(path)
    return Checkpoint(path, manifest.step, model, state, manifest.figures, tuple(rejected or ()))


def _step_folders(root: Path) -> list[tuple[int, Path]]:
    """Step folders by step; one moved aside by a replacement that was cut short still counts."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _STEP.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
        if match and path.is_dir():
            # Sorting puts the ones moved aside first, so a folder in its place wins.
            found[int(match[1].removeprefix("step-"))] = path
    return sorted(found.items())
