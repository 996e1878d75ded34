"""One checkpoint folder: its files and their manifest, written by one process or several, and removed again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import main_thread
from typing import Any

import torch
from torch import Tensor

from paceline import __version__
from paceline.checkpoint.files import FORMAT, MOST_JSON_BYTES, TensorFile, seal, unseal, write_file
from paceline.checkpoint.manifest import MANIFEST, MODEL, SKELETON, STATE, is_ours
from paceline.checkpoint.shards import Part, Share, divide, part_names
from paceline.checkpoint.state import Tree, flatten, flatten_parts
from paceline.core.atomic_write import replace_file, sync_folder
from paceline.core.errors import CheckpointError

_POLL_SECONDS = 0.02


class Folder:
    """What one process writes of a checkpoint, ready to be written; whatever cannot be saved is refused here."""

    def __init__(
        self,
        step: int,
        model: Mapping[str, Tensor | Part],
        state: Tree,
        metrics: Mapping[str, float],
        share: Share | None = None,
    ) -> None:
        self.step, self.share = step, share or Share()
        leaves, skeleton = flatten_parts(state)
        strays, self.metrics = flatten(metrics)
        if strays:
            raise TypeError(f"metrics must be numbers, found tensors: {', '.join(strays)}")
        own_model, model_places = divide(model, self.share)
        own_state, state_places = divide(leaves, self.share)
        self.places = {"model": model_places, "state": state_places}
        alone = self.share.world == 1
        model_name, state_name, _ = (MODEL, STATE, "") if alone else self.share.names
        self.tensors = {model_name: TensorFile(own_model), state_name: TensorFile(own_state)}
        self.pieces: dict[str, Iterable[memoryview]] = dict(self.tensors)
        self.size = sum(file.size for file in self.tensors.values())
        if self.share.rank == 0:
            text = json.dumps(skeleton, allow_nan=False).encode()
            if len(text) > MOST_JSON_BYTES:
                raise TypeError(f"the state has {len(text):,} bytes beside its tensors; keep long lists as tensors")
            self.pieces[SKELETON] = [memoryview(text)]
            self.size += len(text)

    def write(self, path: Path) -> None:
        """Make the folder at `path` alone; the manifest comes last, and everything is on the disk on return."""
        path.mkdir()
        self._write_manifest(path, self._write_files(path))

    def write_part(self, path: Path) -> None:
        """Write this process's files into the folder that all share; the one that describes them comes last.

        Where that fails they are removed, and the others are told.
        """
        described = path / self.share.names[2]
        content = {"format": FORMAT, "step": self.step, "attempt": self.share.attempt}
        try:
            path.mkdir(exist_ok=True)
            content |= {"files": self._write_files(path), "places": self.places}
            sync_folder(path)
            # Nothing may follow: with the last description there, the first process syncs and renames the folder.
            write_file(described, [memoryview(seal(content))])
        except OSError as error:
            with suppress(OSError):
                for name in (*self.pieces, described.name):
                    (path / name).unlink(missing_ok=True)
                write_file(described, [memoryview(seal({**content, "error": str(error)}))])
            raise

    def join_parts(self, path: Path, patience: float) -> None:
        """Wait for the files of all processes, and write the manifest of all of them."""
        files: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + patience
        for rank in range(self.share.world):
            files |= self._await_part(path, rank, deadline, patience)
        for item in path.iterdir():
            if is_ours(item.name) and item.name not in files:
                item.unlink()  # of an earlier save that was cut short
        self._write_manifest(path, files)

    def _await_part(self, path: Path, rank: int, deadline: float, patience: float) -> dict[str, dict[str, Any]]:
        described = path / part_names(rank, self.share.world)[2]
        while (content := _part_of(described, self.share.attempt)) is None:
            # A process that is about to end has lost another one, and nobody waits for what it would save.
            if time.monotonic() > deadline or not main_thread().is_alive():
                raise CheckpointError(
                    f"{described}: process {rank} of {self.share.world} has not written its part of the checkpoint"
                    f" within {patience:g} s; it may have died, or the folder is not shared between the machines"
                )
            time.sleep(_POLL_SECONDS)
        if "error" in content:
            raise CheckpointError(f"{described}: process {rank} of {self.share.world} failed: {content['error']}")
        for name, expected in content["files"].items():
            size = (path / name).stat().st_size
            if size != expected["size"]:
                raise CheckpointError(f"{path / name}: process {rank} wrote {expected['size']} bytes, found {size}")
        raw = described.read_bytes()
        itself = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        return {**content["files"], described.name: itself}

    def _write_files(self, path: Path) -> dict[str, dict[str, Any]]:
        return {name: write_file(path / name, pieces) for name, pieces in self.pieces.items()}

    def _write_manifest(self, path: Path, files: dict[str, dict[str, Any]]) -> None:
        manifest = {
            "format": FORMAT,
            "paceline": __version__,
            "torch": torch.__version__,
            "step": self.step,
            "metrics": self.metrics,
            "files": files,
        }
        write_file(path / MANIFEST, [memoryview(seal(manifest))])
        sync_folder(path)


def _part_of(path: Path, attempt: str) -> dict[str, Any] | None:
    """What a process says of its files, once it has, in this attempt."""
    try:
        content = unseal(path)
    except CheckpointError:
        return None  # not there, or not finished
    return content if content.get("attempt") == attempt else None


def enter_figures(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add to the manifest of a checkpoint what an evaluation of its weights found, all or nothing."""
    path = folder / MANIFEST
    replace_file(path, seal(unseal(path) | {"metrics": flatten(metrics)[1]}))


def holds_only_ours(path: Path) -> bool:
    """Whether a folder is real and holds nothing but files with the names that a checkpoint has."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(is_ours(item.name) and item.is_file() and not item.is_symlink() for item in path.iterdir())


def remove(path: Path) -> None:
    """Delete a folder of ours; one that holds anything else stays as it is."""
    if holds_only_ours(path):
        for item in list(path.iterdir()):
            if is_ours(item.name):
                item.unlink(missing_ok=True)
        path.rmdir()


def retire(replaced: Path, successor: Path) -> None:
    """Delete a folder that was replaced; what others put into it moves to its successor."""
    for item in list(replaced.iterdir()):
        if not is_ours(item.name) and not (successor / item.name).exists():
            item.rename(successor / item.name)
    remove(replaced)
