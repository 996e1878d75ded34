"""Opening checkpoints: verified file by file, also while the run that wrote them removes old ones."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from paceline.checkpoint.best import read_pointer
from paceline.checkpoint.files import (
    MANIFEST,
    MAX_JSON_BYTES,
    MODEL,
    SKELETON,
    STATE,
    Manifest,
    load_checksummed,
    map_tensors,
    open_file,
    parse_json,
    read_manifest,
    read_small,
)
from paceline.checkpoint.shards import Offsets, merge_shards, read_offsets, shard_names, world_size_of
from paceline.checkpoint.state import Tree, unflatten
from paceline.core.errors import CheckpointError

_MAX_OPEN_FILES = 64  # a checkpoint of hundreds of ranks has thousands
_STEP = re.compile(r"(step-\d{8,18})|\.(step-\d{8,18})\.replaced")
_MAX_ATTEMPTS, _RETRY_SECONDS = 20, 0.01


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory; `rejected` lists what is wrong with newer ones."""

    path: Path
    step: int
    model: dict[str, Tensor]
    state: Tree
    metrics: dict[str, float]
    digest: str
    """Equal for checkpoints with equal content."""
    rejected: tuple[str, ...] = ()


Check = Callable[[Checkpoint], object]


def folder_name(step: int) -> str:
    """The folder name of a step."""
    if step < 0:
        raise ValueError(f"expected a step ≥ 0, got {step}")
    return f"step-{step:08d}"


def open_checkpoint(path: Path) -> Checkpoint:
    """A verified checkpoint from a step folder, a run's `best` or a run directory (its newest valid one).

    If the run removes it at this moment, what `path` leads to then is opened.
    """
    for attempt in range(_MAX_ATTEMPTS):
        folder = Path(os.path.realpath(read_pointer(path) or path))
        try:
            _check_path(path, folder)
            return _read(folder) if (folder / MANIFEST).exists() else _open_newest(path)
        except CheckpointError:
            if folder.exists() or attempt == _MAX_ATTEMPTS - 1:
                raise
            time.sleep(_RETRY_SECONDS)
    raise AssertionError


def _check_path(path: Path, folder: Path) -> None:
    expected = "expected a run directory or one of its checkpoints"
    if not folder.exists():
        missing = "links to" if path.is_symlink() else "names"
        target = path.readlink() if path.is_symlink() else folder
        found = f"{missing} {target}, which does not exist" if os.path.lexists(path) else "does not exist"
        raise CheckpointError(f"{path}: {found}; {expected}")
    if not folder.is_dir():
        raise CheckpointError(f"{path}: is a file; {expected}")


def _open_newest(path: Path) -> Checkpoint:
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoint, rejected = newest_in(root)
    if checkpoint is not None:
        return checkpoint
    if rejected:
        raise CheckpointError("\n".join([f"{path}: none of its checkpoints is intact:", *rejected]))
    raise CheckpointError(f"{path}: contains no checkpoint: neither {MANIFEST} nor a step-… folder")


def newest_in(root: Path, check: Check | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint of a folder, and what is wrong with newer ones.

    `check` raises CheckpointError for an intact one that cannot be used.
    """
    rejected: dict[Path, str] = {}
    for _ in range(_MAX_ATTEMPTS):
        for step, path in reversed(step_folders(root)):
            try:
                checkpoint = _read(path, step, tuple(rejected.values()))
                if check:
                    check(checkpoint)
            except CheckpointError as error:
                if not path.is_dir():
                    time.sleep(_RETRY_SECONDS)
                    break  # removed meanwhile, so there are newer ones
                rejected[path] = str(error)
            else:
                return checkpoint, list(rejected.values())
        else:
            break
    return None, list(rejected.values())


def _read(path: Path, step: int | None = None, rejected: tuple[str, ...] = ()) -> Checkpoint:
    with _open_folder(path) as folder:
        manifest = folder.manifest
        if step is not None and manifest.step != step:
            raise CheckpointError(f"{path / MANIFEST}: expected step {step}, found {manifest.step}")
        model, state = folder.read()
    metrics: dict[str, Any] = {**manifest.metrics}  # a user's metric may give any scalar
    return Checkpoint(path, manifest.step, model, state, metrics, manifest.digest, rejected)


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Step folders by step, including one that an interrupted replacement moved aside."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            # Those moved aside sort first, so a folder in its place wins.
            found[int((match[1] or match[2]).removeprefix("step-"))] = path
    return sorted(found.items())


@contextmanager
def _open_folder(path: Path) -> Iterator[_OpenFolder]:
    """A checkpoint folder whose files are opened at once: rotation may rename and remove it at any moment."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        manifest = read_manifest(path, read_small(path / MANIFEST, descriptor))
        names = islice(manifest.files, _MAX_OPEN_FILES)
        files = {name: stack.enter_context(open_file(path / name, descriptor)) for name in names}
        yield _OpenFolder(path, manifest, descriptor, files)


@dataclass(frozen=True)
class _OpenFolder:
    path: Path
    manifest: Manifest
    descriptor: int
    files: dict[str, BinaryIO]

    def read(self) -> tuple[dict[str, Tensor], Tree]:
        """The model and the state, from the files of all ranks."""
        try:
            skeleton = parse_json(self.path / SKELETON, self._bytes(SKELETON))
            if not isinstance(skeleton, dict):
                raise CheckpointError(f"{SKELETON}: expected an object, found {repr(skeleton)[:60]}")
            world_size = world_size_of(self.manifest.files)
            if world_size == 1:
                model, state = (merge_shards([(self._map(name), {})]) for name in (MODEL, STATE))
            else:
                names = [shard_names(rank, world_size) for rank in range(world_size)]
                offsets = [self._offsets(description) for _, _, description in names]
                model = merge_shards((self._map(own[0]), at["model"]) for own, at in zip(names, offsets, strict=True))
                state = merge_shards((self._map(own[1]), at["state"]) for own, at in zip(names, offsets, strict=True))
            return model, unflatten(state, skeleton)
        except CheckpointError as error:
            message = str(error)
            raise CheckpointError(message if str(self.path) in message else f"{self.path}: {message}") from error

    def _offsets(self, name: str) -> dict[str, Offsets]:
        content = load_checksummed(self.path / name, self._bytes(name))
        if content.get("step") != self.manifest.step:
            raise CheckpointError(f"{name}: expected step {self.manifest.step}, found {repr(content.get('step'))[:60]}")
        return read_offsets(name, content.get("places"))

    def _map(self, name: str) -> dict[str, Tensor]:
        with self._verified(name) as file:
            return map_tensors(self.path / name, file.fileno())

    def _bytes(self, name: str) -> bytes:
        with self._verified(name) as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise CheckpointError(f"{self.path / name}: expected at most {MAX_JSON_BYTES:,} bytes")
        return raw

    @contextmanager
    def _verified(self, name: str) -> Iterator[BinaryIO]:
        """A file with the size and digest of the manifest; once per file."""
        path, expected = self.path / name, self.manifest.files[name]
        with self.files.pop(name, None) or open_file(path, self.descriptor) as file:
            try:
                size = os.fstat(file.fileno()).st_size
                if size != expected.size:
                    raise CheckpointError(f"{path}: damaged: expected {expected.size} bytes, found {size}")
                found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
                if found != expected.sha256:
                    raise CheckpointError(f"{path}: damaged: expected SHA-256 {expected.sha256}, found {found}")
                file.seek(0)
                yield file
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
