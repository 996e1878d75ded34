"""The checkpoints of a run: committed by a rename, rotated, the best one linked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from paceline.checkpoint.best import link_best, read_pointer, resolve_best
from paceline.checkpoint.files import FORMAT, Manifest, dump_checksummed, load_checksummed, read_manifest
from paceline.checkpoint.folder import Folder, has_only_own_files, remove, remove_replaced, write_metrics
from paceline.checkpoint.reader import Check, Checkpoint, folder_name, newest_in, step_folders
from paceline.checkpoint.shards import SaveRank, TensorShard
from paceline.checkpoint.state import Tree, flatten
from paceline.core.atomic_write import move_aside, remove_partial_files, replace_file, sync_folder
from paceline.core.errors import CheckpointError

INDEX = "index.json"
_ASIDE = re.compile(r"\.(step-(\d{8,}))\.(partial|replaced|removed)")


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, and whether it is the best so far."""

    path: Path
    is_best: bool


class Store:
    """Keeps the last checkpoints under `root`, the best by one metric, and one every `keep_every` steps.

    `best` beside `root` links to the best. Only folders that its index lists are ever deleted, and only if they contain
    nothing else.
    """

    def __init__(
        self,
        root: Path,
        keep_last: int = 3,
        best: str | None = None,
        direction: Literal["max", "min"] = "max",
        keep_every: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {number}")
        self.root = Path(root)
        self.keep_last = keep_last
        self.best = best
        self.direction = direction
        self.keep_every = keep_every
        self.timeout = timeout
        """How many seconds rank 0 waits for the files of other ranks."""
        self.link = self.root.parent / "best"
        self.rejected: list[str] = []
        self.last_step: int | None = None
        """The step last saved, or found by `newest`."""

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor | TensorShard],
        state: Tree,
        metrics: Mapping[str, float],
        rank: SaveRank | None = None,
    ) -> Saved:
        """Write a checkpoint atomically, then update `best`, rotation and index.

        With several processes each calls this with its `rank`; rank 0 commits the files of all.
        """
        return self.write(Folder(step, model, state, metrics, rank))

    def write(self, content: Folder) -> Saved:
        """As `save`, of a folder that is ready."""
        path = self.path_of(content.step)
        try:
            if content.rank.rank == 0:
                saved = self._write_and_commit(content, path)
            else:
                self.root.mkdir(parents=True, exist_ok=True)
                content.write_shards(_aside(path, "partial"))
                saved = Saved(path, is_best=False)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be saved ({content.size:,} bytes are needed): {error}") from error
        self.last_step = content.step
        return saved

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> Saved:
        """Add metrics to the checkpoint of a step, then update `best`, rotation and index.

        Until then it is the newest, which is never removed.
        """
        path = self.path_of(step)
        try:
            write_metrics(path, metrics)
            return self._update(step, path)
        except OSError as error:
            raise CheckpointError(f"{path}: its metrics cannot be recorded: {error}") from error

    def path_of(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.root / folder_name(step)

    def newest(self, check: Check | None = None) -> Checkpoint | None:
        """The newest valid checkpoint that passes `check`; `rejected` lists what is wrong with newer ones."""
        checkpoint, self.rejected = newest_in(self.root, check)
        self.last_step = checkpoint.step if checkpoint else None
        return checkpoint

    def index(self) -> list[dict[str, Any]]:
        """The checkpoints of this store, by step: {"step", "metrics", "best"}."""
        manifests = self._manifests()
        best = self._best_step(manifests)
        return [{"step": m.step, "metrics": m.metrics, "best": m.step == best} for m in manifests]

    def clear_best_path(self) -> str | None:
        """Move aside what is at the path of the `best` link, such as a copy that was made without links.

        Returns what was done, if anything.
        """
        if self.link.is_symlink() or not self.link.exists() or read_pointer(self.link) is not None:
            return None
        return f"{self.link} was at the path of the link to the best checkpoint; it is now {move_aside(self.link)}"

    def _write_and_commit(self, content: Folder, path: Path) -> Saved:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise CheckpointError(f"{path}: is at the path of a checkpoint; move it")
        self.root.mkdir(parents=True, exist_ok=True)
        # Other ranks may be writing already, for this step or the next save.
        self._clean_up(before=content.step if content.rank.world_size > 1 else None)
        # Recorded before the commit, so that a folder committed just before a kill is known as ours.
        self._write_index(saving=content.step)
        self._commit(content, path)
        return self._update(content.step, path)

    def _update(self, step: int, path: Path) -> Saved:
        """Update `best`, rotation and index."""
        manifests = self._manifests()
        best = self._best_step(manifests)
        if best is not None:
            self.clear_best_path()
            link_best(self.link, Path(self.root.name, folder_name(best)))
        self._rotate([manifest.step for manifest in manifests], {step, best})
        self._write_index(saving=None)
        return Saved(path, is_best=best == step)

    def _manifests(self) -> list[Manifest]:
        ours = self._indexed_steps()
        manifests = []
        for step, path in step_folders(self.root):
            try:
                manifest = read_manifest(path)
            except CheckpointError:
                continue
            if manifest.step == step and (ours is None or step in ours):
                manifests.append(manifest)
        return manifests

    def _indexed_steps(self) -> set[int] | None:
        """The steps in the index; None without a valid index."""
        try:
            content = load_checksummed(self.root / INDEX)
            return {entry["step"] for entry in content["steps"]} | {content["saving"]}
        except (CheckpointError, KeyError, TypeError):
            return None

    def _write_index(self, saving: int | None) -> None:
        steps = flatten(self.index())[1]
        replace_file(self.root / INDEX, dump_checksummed({"format": FORMAT, "steps": steps, "saving": saving}))

    def _best_step(self, manifests: list[Manifest]) -> int | None:
        metrics = {m.step: m.metrics.get(self.best) for m in manifests} if self.best is not None else {}
        scores = {step: x for step, x in metrics.items() if isinstance(x, int | float) and not math.isnan(x)}
        if not scores:
            return None
        select = max if self.direction == "max" else min
        return select(scores, key=lambda step: scores[step])

    def _commit(self, content: Folder, path: Path) -> None:
        partial, replaced = _aside(path, "partial"), _aside(path, "replaced")
        try:
            if content.rank.world_size == 1:
                if partial.exists():  # it holds a foreign file, else `_clean_up` has removed it
                    move_aside(partial)
                content.write(partial)
            else:
                content.write_shards(partial)
                content.join_shards(partial, self.timeout)
            if path.exists():
                path.rename(replaced)
            partial.rename(path)
        except BaseException:
            # What cannot be removed while other ranks still write is removed by the next save.
            with suppress(OSError):
                remove(partial)
            raise
        sync_folder(self.root)
        if replaced.exists():
            remove_replaced(replaced, path)

    def _rotate(self, steps: list[int], keep: set[int | None]) -> None:
        linked = resolve_best(self.link)
        for step in steps[: -self.keep_last]:
            path = self.path_of(step)
            removed = _aside(path, "removed")
            is_kept = step in keep or path.resolve() == linked or (self.keep_every and step % self.keep_every == 0)
            if is_kept or not has_only_own_files(path) or removed.exists():
                continue
            # Renamed first: an interrupted rotation leaves nothing that looks like a checkpoint.
            path.rename(removed)
            remove(removed)

    def _clean_up(self, before: int | None) -> None:
        """Finish an interrupted save or rotation; partial folders only if `before` this step."""
        remove_partial_files(self.root)
        for path in sorted(self.root.iterdir()):
            match = _ASIDE.fullmatch(path.name)
            if match is None:
                continue
            if path.is_symlink() or not path.is_dir():
                move_aside(path)  # in the way of a save; a link could lead anywhere
                continue
            successor = self.root / match[1]
            if match[3] == "removed" or (match[3] == "partial" and (before is None or int(match[2]) < before)):
                remove(path)
            elif match[3] == "replaced" and successor.exists():
                remove_replaced(path, successor)
            elif match[3] == "replaced":
                path.rename(successor)


def _aside(path: Path, what: str) -> Path:
    """The path of a step's folder while it is not a checkpoint: partial, replaced or removed."""
    return path.with_name(f".{path.name}.{what}")
