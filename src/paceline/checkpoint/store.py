"""The checkpoints of a run: committed by a rename, verified when opened, rotated."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from paceline.checkpoint import files
from paceline.checkpoint.best import named_in, point, target_of
from paceline.checkpoint.folder import Folder, enter_figures, holds_only_ours, remove, retire
from paceline.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from paceline.checkpoint.open_folder import OpenFolder
from paceline.checkpoint.shards import Part, Share
from paceline.checkpoint.state import Tree, flatten
from paceline.core.atomic_write import move_aside, remove_partial_files, replace_file, sync_folder
from paceline.core.errors import CheckpointError

__all__ = ["Checkpoint", "Saved", "Store", "folder_name", "open_checkpoint"]

INDEX = "index.json"
_ASIDE = re.compile(r"\.(step-(\d{8,}))\.(partial|replaced|removed)")


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, and whether it is the best so far."""

    path: Path
    is_best: bool


class Store:
    """Keeps the newest checkpoints under `root`, the best by one metric, and those of every `keep_every` steps.

    `best` beside `root` leads to the best. Nothing is ever deleted but folders that its own index lists, and only if
    they hold nothing else.
    """

    def __init__(
        self,
        root: Path,
        keep_last: int = 3,
        best: str | None = None,
        direction: Literal["max", "min"] = "max",
        keep_every: int | None = None,
        patience: float = 300.0,
    ) -> None:
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, found {number}")
        self.root = Path(root)
        self.keep_last = keep_last
        self.best = best
        self.direction = direction
        self.keep_every = keep_every
        self.patience = patience
        """How many seconds the first of several processes waits for the parts of the others."""
        self.link = self.root.parent / "best"
        self.rejected: list[str] = []
        self.last_step: int | None = None
        """The step saved last, or found by `newest`."""

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor | Part],
        state: Tree,
        metrics: Mapping[str, float],
        share: Share | None = None,
    ) -> Saved:
        """Write a checkpoint completely or not at all, then bring `best`, rotation and index up to date.

        Of several processes each calls this with its `share`; the first one commits what all of them wrote.
        """
        return self.write(Folder(step, model, state, metrics, share))

    def write(self, content: Folder) -> Saved:
        """As `save`, of what was gathered before."""
        path = self.path_of(content.step)
        try:
            if content.share.rank == 0:
                saved = self._write_and_commit(content, path)
            else:
                self.root.mkdir(parents=True, exist_ok=True)
                content.write_part(_aside(path, "partial"))
                saved = Saved(path, is_best=False)
        except OSError as error:
            needed = f"{content.size:,} bytes are needed"
            raise CheckpointError(f"{path}: saving the checkpoint failed ({needed}): {error}") from error
        self.last_step = content.step
        return saved

    def enter(self, step: int, metrics: Mapping[str, float]) -> Saved:
        """Enter what the checkpoint of a step was found to reach; `best`, rotation and index follow.

        Until then it is the newest, which is never rotated out.
        """
        path = self.path_of(step)
        try:
            enter_figures(path, metrics)
            return self._settle(step, path)
        except OSError as error:
            raise CheckpointError(f"{path}: entering the metrics of the checkpoint failed: {error}") from error

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, once there is one."""
        return self.root / folder_name(step)

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """See `open_checkpoint`."""
        return open_checkpoint(path)

    def newest(self, check: Check | None = None) -> Checkpoint | None:
        """The newest checkpoint that verifies, and passes `check`; `rejected` says what is wrong with newer ones."""
        checkpoint, self.rejected = newest_in(self.root, check)
        self.last_step = checkpoint.step if checkpoint else None
        return checkpoint

    def index(self) -> list[dict[str, Any]]:
        """What this store wrote and still holds, by step: {"step", "metrics", "best"}."""
        manifests = self._manifests()
        best = self._best_step(manifests)
        return [{"step": m.step, "metrics": m.metrics, "best": m.step == best} for m in manifests]

    def make_way_for_best(self) -> str | None:
        """Put what is in the place of the link to the best checkpoint elsewhere; tells what was done, if anything.

        In a copy of a run that was made without links, that is a checkpoint: it takes its place among the others
        unless it is there already. Nothing else than such a second copy is removed.
        """
        if self.link.is_symlink() or not self.link.exists() or named_in(self.link) is not None:
            return None
        path = self._copied_place()
        if path is None:
            return f"{self.link} is in the place of a link to the best checkpoint; it is now {move_aside(self.link)}"
        replaced = _aside(path, "replaced")
        if path.exists():
            path.rename(replaced)
        self.link.rename(path)
        if replaced.exists():
            retire(replaced, path)
        return f"{self.link} was a copy of a checkpoint; it is now {path}"

    def _copied_place(self) -> Path | None:
        """Where the checkpoint in the place of the link belongs; None if it is none, or another one is there."""
        try:
            copy = open_checkpoint(self.link)
            path = self.path_of(copy.step)
            is_free = not os.path.lexists(path)
            is_second = not is_free and holds_only_ours(path) and read_manifest(path).digest == copy.digest
        except CheckpointError:
            return None
        return path if holds_only_ours(self.link) and (is_free or is_second) else None

    def _write_and_commit(self, content: Folder, path: Path) -> Saved:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise CheckpointError(f"{path}: is in the way of a checkpoint; move it away")
        self.root.mkdir(parents=True, exist_ok=True)
        # Other processes may be writing already, into the folder of this step or of the one that they save next.
        self._tidy(before=content.step if content.share.world > 1 else None)
        # Said beforehand, so that a folder committed just before a kill is known to be ours.
        self._write_index(saving=content.step)
        self._commit(content, path)
        return self._settle(content.step, path)

    def _settle(self, step: int, path: Path) -> Saved:
        """Bring `best`, rotation and index up to date with the checkpoints that are there."""
        best = self._link_best()
        self._rotate({step, best})
        self._write_index(saving=None)
        return Saved(path, is_best=best == step)

    def _manifests(self) -> list[Manifest]:
        ours = self._listed_steps()
        manifests = []
        for step, path in step_folders(self.root):
            try:
                manifest = read_manifest(path)
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
        replace_file(self.root / INDEX, files.seal({"format": files.FORMAT, "steps": steps, "saving": saving}))

    def _best_step(self, manifests: list[Manifest]) -> int | None:
        metrics = {m.step: m.metrics.get(self.best) for m in manifests} if self.best is not None else {}
        scores = {step: x for step, x in metrics.items() if isinstance(x, int | float) and not math.isnan(x)}
        if not scores:
            return None
        choose = max if self.direction == "max" else min
        return choose(scores, key=lambda step: scores[step])

    def _link_best(self) -> int | None:
        best = self._best_step(self._manifests())
        if best is not None:
            self.make_way_for_best()
            point(self.link, Path(self.root.name, folder_name(best)))
        return best

    def _commit(self, content: Folder, path: Path) -> None:
        partial, replaced = _aside(path, "partial"), _aside(path, "replaced")
        try:
            if content.share.world == 1:
                content.write(partial)
            else:
                content.write_part(partial)
                content.join_parts(partial, self.patience)
            if path.exists():
                path.rename(replaced)
            partial.rename(path)
        except BaseException:
            # What cannot be removed now, as others still write there, goes with the next save.
            with suppress(OSError):
                remove(partial)
            raise
        sync_folder(self.root)
        if replaced.exists():
            retire(replaced, path)

    def _rotate(self, keep: set[int | None]) -> None:
        steps = [manifest.step for manifest in self._manifests()]
        linked = target_of(self.link)
        for step in steps[: -self.keep_last]:
            path = self.path_of(step)
            removed = _aside(path, "removed")
            is_kept = step in keep or path.resolve() == linked or (self.keep_every and step % self.keep_every == 0)
            if is_kept or not holds_only_ours(path) or removed.exists():
                continue
            # Renamed first: a rotation cut short leaves nothing that looks like a checkpoint.
            path.rename(removed)
            remove(removed)

    def _tidy(self, before: int | None) -> None:
        """Finish what a killed save or rotation left half done; partial folders only if `before` this step."""
        remove_partial_files(self.root)
        for path in sorted(self.root.iterdir()):
            match = _ASIDE.fullmatch(path.name)
            if match is None or path.is_symlink():
                continue
            successor = self.root / match[1]
            if match[3] == "removed" or (match[3] == "partial" and (before is None or int(match[2]) < before)):
                remove(path)
            elif match[3] == "replaced" and successor.exists():
                retire(path, successor)
            elif match[3] == "replaced":
                path.rename(successor)


def _aside(path: Path, what: str) -> Path:
    """Where the folder of a step is while it is not a checkpoint: yet, any more, or for a moment."""
    return path.with_name(f".{path.name}.{what}")


_STEP = re.compile(r"(step-\d{8,18})|\.(step-\d{8,18})\.replaced")
_MOST_LOOKS, _LOOK_SECONDS = 5, 0.01


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory; `rejected` tells of newer ones that were damaged."""

    path: Path
    step: int
    model: dict[str, Tensor]
    state: Tree
    metrics: dict[str, float]
    digest: str
    """The same for the same content, wherever it was read."""
    rejected: tuple[str, ...] = ()


Check = Callable[[Checkpoint], object]


def folder_name(step: int) -> str:
    """What the folder of a step is called."""
    if step < 0:
        raise ValueError(f"a step is counted from 0, found {step}")
    return f"step-{step:08d}"


def open_checkpoint(path: Path) -> Checkpoint:
    """A verified checkpoint from a step folder, a run's `best` or a run directory (its newest valid one).

    One that a run removes at this moment is no failure: what `path` leads to then is opened instead.
    """
    for look in range(_MOST_LOOKS):
        folder = Path(os.path.realpath(named_in(path) or path))
        try:
            _check_place(path, folder)
            return _read(folder) if (folder / MANIFEST).exists() else _open_newest(path)
        except CheckpointError:
            if folder.exists() or look == _MOST_LOOKS - 1:
                raise
            time.sleep(_LOOK_SECONDS)
    raise AssertionError


def _check_place(path: Path, folder: Path) -> None:
    expected = "expected a run directory or one of its checkpoints"
    if not folder.exists():
        missing = "links to" if path.is_symlink() else "names"
        target = path.readlink() if path.is_symlink() else folder
        what = f"{missing} {target}, which does not exist" if os.path.lexists(path) else "does not exist"
        raise CheckpointError(f"{path}: {what}; {expected}")
    if not folder.is_dir():
        raise CheckpointError(f"{path}: is a file; {expected}")


def _open_newest(path: Path) -> Checkpoint:
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    for look in range(_MOST_LOOKS):  # a run that saves and rotates may move each checkpoint while it is looked for
        checkpoint, rejected = newest_in(root)
        if checkpoint is not None:
            return checkpoint
        if look < _MOST_LOOKS - 1:
            time.sleep(_LOOK_SECONDS)
    if rejected:
        raise CheckpointError("\n".join([f"{path}: none of its checkpoints is whole:", *rejected]))
    raise CheckpointError(f"{path}: holds no checkpoint: found neither {MANIFEST} nor a step-… folder")


def newest_in(root: Path, check: Check | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint in a folder of them that verifies, and what is wrong with newer ones.

    `check` raises CheckpointError for one that is whole but cannot be used.
    """
    rejected: dict[Path, str] = {}
    for _ in range(_MOST_LOOKS):
        for step, path in reversed(step_folders(root)):
            try:
                checkpoint = _read(path, step, tuple(rejected.values()))
                if check:
                    check(checkpoint)
            except CheckpointError as error:
                if not path.is_dir():
                    break  # removed while it was being opened, so there are newer ones
                rejected[path] = str(error)
            else:
                return checkpoint, list(rejected.values())
        else:
            break
    return None, list(rejected.values())


def _read(path: Path, step: int | None = None, rejected: tuple[str, ...] = ()) -> Checkpoint:
    with OpenFolder(path) as folder:
        manifest = folder.manifest
        if step is not None and manifest.step != step:
            raise CheckpointError(f"{path / MANIFEST}: expected step {step}, found {manifest.step}")
        model, state = folder.read()
    return Checkpoint(path, manifest.step, model, state, manifest.metrics, manifest.digest, rejected)


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Step folders by step; one moved aside by a replacement that was cut short still counts."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            # Sorting puts the ones moved aside first, so a folder in its place wins.
            found[int((match[1] or match[2]).removeprefix("step-"))] = path
    return sorted(found.items())
