"""One checkpoint folder: its files and their manifest, written by one process or several, verified before use."""

from __future__ import annotations

import hashlib
import json
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import main_thread
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from paceline import __version__
from paceline.checkpoint.files import FORMAT, TensorFile, read_tensors, seal, unseal, write_file
from paceline.checkpoint.shards import Part, Share, assemble, divide, is_part_name, part_names, world_of
from paceline.checkpoint.state import Tree, flatten, flatten_parts, unflatten
from paceline.core.disk import sync_folder
from paceline.core.errors import CheckpointError

MODEL, STATE, SKELETON, MANIFEST = "model.safetensors", "state.safetensors", "state.json", "manifest.json"
_OUR_NAMES = frozenset({MODEL, STATE, SKELETON, MANIFEST})
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Manifest:
    """What a folder says of itself: its step, its figures, and the size and SHA-256 of each of its files."""

    step: int
    figures: dict[str, float]
    files: dict[str, dict[str, Any]]


class Folder:
    """What one process writes of a checkpoint, ready to be written; whatever cannot be saved is refused here."""

    def __init__(
        self,
        step: int,
        model: Mapping[str, Tensor | Part],
        state: Tree,
        figures: Mapping[str, float],
        share: Share | None = None,
    ) -> None:
        self.step, self.share = step, share or Share()
        leaves, skeleton = flatten_parts(state)
        strays, self.figures = flatten(figures)
        if strays:
            raise TypeError(f"figures must be numbers, found tensors: {', '.join(strays)}")
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
            "figures": self.figures,
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


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked in itself but not yet against the files."""
    path = folder / MANIFEST
    content = unseal(path)
    try:
        files = {name: {"size": int(f["size"]), "sha256": str(f["sha256"])} for name, f in content["files"].items()}
        manifest = Manifest(int(content["step"]), dict(unflatten({}, content["figures"])), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not the manifest of a checkpoint") from error
    world = world_of(files)
    wanted = {MODEL, STATE} if world == 1 else {name for rank in range(world) for name in part_names(rank, world)}
    if set(files) != wanted | {SKELETON}:
        expected = ", ".join(sorted(wanted | {SKELETON}))
        raise CheckpointError(f"{path}: expected to list {expected}; found {', '.join(sorted(files))}")
    return manifest


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder after every file was found to be what it says."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
                raise CheckpointError(f"{path}: damaged: expected a file, found something else")
            if status.st_size != expected["size"]:
                raise CheckpointError(f"{path}: damaged: expected {expected['size']} bytes, found {status.st_size}")
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        if found != expected["sha256"]:
            raise CheckpointError(f"{path}: damaged: expected SHA-256 {expected['sha256']}, found {found}")
    return manifest


def read_content(folder: Path, manifest: Manifest) -> tuple[dict[str, Tensor], Tree]:
    """The model and the state of a verified folder, whole, however many processes wrote them."""
    skeleton = json.loads((folder / SKELETON).read_bytes())
    world = world_of(manifest.files)
    if world == 1:
        return read_tensors(folder / MODEL), unflatten(read_tensors(folder / STATE), skeleton)
    names = [part_names(rank, world) for rank in range(world)]
    places = [unseal(folder / described)["places"] for _, _, described in names]
    load = safetensors.torch.load_file
    try:
        model = assemble((load(folder / n[0]), p["model"]) for n, p in zip(names, places, strict=True))
        state = assemble((load(folder / n[1]), p["state"]) for n, p in zip(names, places, strict=True))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return model, unflatten(state, skeleton)


def is_ours(name: str) -> bool:
    """Whether a file of a checkpoint may be called so."""
    return name in _OUR_NAMES or is_part_name(name)


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
