"""The checkpoints of one run: committed by a rename, verified when opened, rotated with care."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from paceline.checkpoint import files
from paceline.checkpoint.folder import Folder, Manifest, holds_only_ours, read_manifest, remove, retire
from paceline.checkpoint.reading import Checkpoint, folder_name, newest_in, open_checkpoint, step_folders
from paceline.checkpoint.shards import Part, Share
from paceline.checkpoint.state import Tree, flatten
from paceline.core.disk import replace_file, sync_folder
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
    """Keeps the newest checkpoints under `root`, the best by one figure, and those of every `keep_every` steps.

    `best` beside `root` links to the best. Nothing is ever deleted but folders that its own index lists, and only if
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
        figures: Mapping[str, float],
        share: Share | None = None,
    ) -> Saved:
        """Write a checkpoint completely or not at all, then bring `best`, rotation and index up to date.

        Of several processes each calls this with its `share`; the first one commits what all of them wrote.
        """
        return self.write(Folder(step, model, state, figures, share))

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

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, once there is one."""
        return self.root / folder_name(step)

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """See `open_checkpoint`."""
        return open_checkpoint(path)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, if any; `rejected` says what is wrong with newer ones."""
        checkpoint, self.rejected = newest_in(self.root)
        self.last_step = checkpoint.step if checkpoint else None
        return checkpoint

    def index(self) -> list[dict[str, Any]]:
        """What this store wrote and still holds, by step: {"step", "figures", "best"}."""
        manifests = self._manifests()
        best = self._best_step(manifests)
        return [{"step": m.step, "figures": m.figures, "best": m.step == best} for m in manifests]

    def _write_and_commit(self, content: Folder, path: Path) -> Saved:
        self._refuse_obstacles(path)
        self.root.mkdir(parents=True, exist_ok=True)
        # Other processes may be writing already, into the folder of this step or of the one that they save next.
        self._tidy(before=content.step if content.share.world > 1 else None)
        # Said beforehand, so that a folder committed just before a kill is known to be ours.
        self._write_index(saving=content.step)
        self._commit(content, path)
        best = self._link_best()
        self._rotate({content.step, best})
        self._write_index(saving=None)
        return Saved(path, is_best=best == content.step)

    def _refuse_obstacles(self, path: Path) -> None:
        if self.best is not None and self.link.exists() and not self.link.is_symlink():
            raise CheckpointError(f"{self.link}: is in the way of the link to the best checkpoint; move it away")
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise CheckpointError(f"{path}: is in the way of a checkpoint; move it away")

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
            sync_folder(self.link.parent)
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
        linked = self.link.resolve().name if self.link.is_symlink() else None
        for step in steps[: -self.keep_last]:
            path = self.path_of(step)
            removed = _aside(path, "removed")
            is_kept = step in keep or path.name == linked or (self.keep_every and step % self.keep_every == 0)
            if is_kept or not holds_only_ours(path) or removed.exists():
                continue
            # Renamed first: a rotation cut short leaves nothing that looks like a checkpoint.
            path.rename(removed)
            remove(removed)

    def _tidy(self, before: int | None) -> None:
        """Finish what a killed save or rotation left half done; partial folders only if `before` this step."""
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
