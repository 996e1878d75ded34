"""One checkpoint folder: written by one process or several, described by a manifest, and removed."""

from __future__ import annotations

import errno
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
from paceline.checkpoint.files import (
    FORMAT,
    MANIFEST,
    MAX_JSON_BYTES,
    MODEL,
    SKELETON,
    STATE,
    TensorFile,
    dump_checksummed,
    is_checkpoint_file,
    load_checksummed,
    write_file,
)
from paceline.checkpoint.shards import SaveRank, TensorShard, select_local, shard_names
from paceline.checkpoint.state import Tree, flatten, flatten_shards
from paceline.core.atomic_write import replace_file, sync_folder
from paceline.core.errors import CheckpointError

_POLL_SECONDS = 0.02


class Folder:
    """The files of one rank, ready to write; what cannot be saved is refused here."""

    def __init__(
        self,
        step: int,
        model: Mapping[str, Tensor | TensorShard],
        state: Tree,
        metrics: Mapping[str, float],
        rank: SaveRank | None = None,
    ) -> None:
        self.step, self.rank = step, rank or SaveRank()
        leaves, skeleton = flatten_shards(state)
        tensors, self.metrics = flatten(metrics)
        if tensors:
            raise TypeError(f"metrics must be numbers, found tensors: {', '.join(tensors)}")
        own_model, model_offsets = select_local(model, self.rank)
        own_state, state_offsets = select_local(leaves, self.rank)
        self.offsets = {"model": model_offsets, "state": state_offsets}
        model_name, state_name, _ = (MODEL, STATE, "") if self.rank.world_size == 1 else self.rank.names
        self.tensors = {model_name: TensorFile(own_model), state_name: TensorFile(own_state)}
        self.pieces: dict[str, Iterable[memoryview]] = dict(self.tensors)
        self.size = sum(file.size for file in self.tensors.values())
        if self.rank.rank == 0:
            text = json.dumps(skeleton, allow_nan=False).encode()
            if len(text) > MAX_JSON_BYTES:
                raise TypeError(f"the state has {len(text):,} bytes besides its tensors; keep long lists as tensors")
            self.pieces[SKELETON] = [memoryview(text)]
            self.size += len(text)

    def write(self, path: Path) -> None:
        """Create the folder at `path`, manifest last; everything is synced to the disk on return."""
        path.mkdir()
        self._write_manifest(path, self._write_files(path))

    def write_shards(self, path: Path) -> None:
        """Write this rank's files into the shared folder, their description last.

        If that fails, they are removed and the description holds the error for rank 0.
        """
        description = path / self.rank.names[2]
        content = {"format": FORMAT, "step": self.step, "attempt": self.rank.attempt}
        try:
            path.mkdir(exist_ok=True)
            if path.is_symlink():
                raise OSError(errno.ELOOP, "a link that no process of this run made", str(path))
            content |= {"files": self._write_files(path), "places": self.offsets}
            sync_folder(path)
            # Nothing may follow: once the last description is there, rank 0 renames the folder.
            write_file(description, [memoryview(dump_checksummed(content))])
        except OSError as error:
            with suppress(OSError):
                for name in (*self.pieces, description.name):
                    (path / name).unlink(missing_ok=True)
                write_file(description, [memoryview(dump_checksummed({**content, "error": str(error)}))])
            raise

    def join_shards(self, path: Path, timeout: float) -> None:
        """Wait for the files of all ranks, then write the manifest."""
        files: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        for rank in range(self.rank.world_size):
            files |= self._wait_for(path, rank, deadline, timeout)
        for item in path.iterdir():
            if is_checkpoint_file(item.name) and item.name not in files:
                item.unlink()  # of an interrupted save
        self._write_manifest(path, files)

    def _wait_for(self, path: Path, rank: int, deadline: float, timeout: float) -> dict[str, dict[str, Any]]:
        world_size = self.rank.world_size
        description = path / shard_names(rank, world_size)[2]
        while (content := _read_description(description, self.rank.attempt)) is None:
            # A process that ends here has lost another one, and nobody waits for what it would save.
            if time.monotonic() > deadline or not main_thread().is_alive():
                raise CheckpointError(
                    f"{description}: rank {rank} of {world_size} has not written its part of the checkpoint within"
                    f" {timeout:g} s; it may have died, or the folder is not shared between the machines"
                )
            time.sleep(_POLL_SECONDS)
        if "error" in content:
            raise CheckpointError(f"{description}: rank {rank} of {world_size} failed: {content['error']}")
        for name, expected in content["files"].items():
            size = (path / name).stat().st_size
            if size != expected["size"]:
                raise CheckpointError(f"{path / name}: rank {rank} wrote {expected['size']} bytes, found {size}")
        raw = description.read_bytes()
        entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        return {**content["files"], description.name: entry}

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
        write_file(path / MANIFEST, [memoryview(dump_checksummed(manifest))])
        sync_folder(path)


def _read_description(path: Path, attempt: str) -> dict[str, Any] | None:
    """The description of a rank's files in this attempt; None as long as there is none."""
    try:
        content = load_checksummed(path)
    except CheckpointError:
        return None  # not there, or not finished
    return content if content.get("attempt") == attempt else None


def write_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Replace the metrics in a checkpoint's manifest, atomically."""
    path = folder / MANIFEST
    replace_file(path, dump_checksummed(load_checksummed(path) | {"metrics": flatten(metrics)[1]}))


def has_only_own_files(path: Path) -> bool:
    """Whether a path is a folder, not a link, with nothing but files that a checkpoint has."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(is_checkpoint_file(item.name) and item.is_file() and not item.is_symlink() for item in path.iterdir())


def remove(path: Path) -> None:
    """Delete a checkpoint folder, unless it holds anything else."""
    if has_only_own_files(path):
        for item in list(path.iterdir()):
            if is_checkpoint_file(item.name):
                item.unlink(missing_ok=True)
        path.rmdir()


def remove_replaced(replaced: Path, successor: Path) -> None:
    """Delete a folder that was replaced; files of others in it move to its successor."""
    for item in list(replaced.iterdir()):
        if not is_checkpoint_file(item.name) and not (successor / item.name).exists():
            item.rename(successor / item.name)
    remove(replaced)
