"""A checkpoint folder that is being read: verified file by file, even while the run that wrote it removes it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType

from torch import Tensor

from paceline.checkpoint.files import MOST_JSON_BYTES, map_tensors, parse_json, parse_sealed, read_small
from paceline.checkpoint.manifest import MANIFEST, MODEL, SKELETON, STATE, parse_manifest
from paceline.checkpoint.shards import Places, assemble, part_names, read_places, world_of
from paceline.checkpoint.state import Tree, unflatten
from paceline.core.errors import CheckpointError

_MOST_HELD = 64  # files that are kept open at a time; a checkpoint of hundreds of processes has thousands


class OpenFolder:
    """Holds the files of a folder open from the start: rotation renames and removes folders at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, int] = {}
        with ExitStack() as stack:
            self._folder = _open(path, os.O_DIRECTORY)
            stack.callback(os.close, self._folder)
            stack.callback(self._close_files)
            self.manifest = parse_manifest(path / MANIFEST, read_small(path / MANIFEST, self._folder))
            for name in islice(self.manifest.files, _MOST_HELD):
                self._held[name] = _open(path / name, 0, self._folder)
            self._resources = stack.pop_all()

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    def read(self) -> tuple[dict[str, Tensor], Tree]:
        """The model and the state, whole, however many processes wrote them."""
        try:
            skeleton = parse_json(self.path / SKELETON, self._text(SKELETON))
            if not isinstance(skeleton, dict):
                raise CheckpointError(f"{SKELETON}: expected an object, found {repr(skeleton)[:60]}")
            model, state = self._tensors()
            return model, unflatten(state, skeleton)
        except CheckpointError as error:
            message = str(error)
            raise CheckpointError(message if str(self.path) in message else f"{self.path}: {message}") from error

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        world = world_of(self.manifest.files)
        if world == 1:
            return assemble([(self._mapped(MODEL), {})]), assemble([(self._mapped(STATE), {})])
        names = [part_names(rank, world) for rank in range(world)]
        places = [self._places(described) for _, _, described in names]
        model = assemble((self._mapped(each[0]), place["model"]) for each, place in zip(names, places, strict=True))
        state = assemble((self._mapped(each[1]), place["state"]) for each, place in zip(names, places, strict=True))
        return model, state

    def _places(self, name: str) -> dict[str, Places]:
        content = parse_sealed(self.path / name, self._text(name))
        if content.get("step") != self.manifest.step:
            raise CheckpointError(f"{name}: expected step {self.manifest.step}, found {repr(content.get('step'))[:60]}")
        return read_places(name, content.get("places"))

    def _mapped(self, name: str) -> dict[str, Tensor]:
        with self._verified(name) as descriptor:
            return map_tensors(self.path / name, descriptor)

    def _text(self, name: str) -> bytes:
        with self._verified(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > MOST_JSON_BYTES:
                raise CheckpointError(f"{self.path / name}: expected at most {MOST_JSON_BYTES:,} bytes, found {size:,}")
            return os.pread(descriptor, size, 0)

    @contextmanager
    def _verified(self, name: str) -> Iterator[int]:
        """A file that was found to be what the manifest says; each is asked for once."""
        path, expected = self.path / name, self.manifest.files[name]
        descriptor = self._held.pop(name, None)
        descriptor = _open(path, 0, self._folder) if descriptor is None else descriptor
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: damaged: expected a file, found something else")
            if status.st_size != expected.size:
                raise CheckpointError(f"{path}: damaged: expected {expected.size} bytes, found {status.st_size}")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != expected.sha256:
                raise CheckpointError(f"{path}: damaged: expected SHA-256 {expected.sha256}, found {found}")
            yield descriptor
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _close_files(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _open(path: Path, flags: int, folder: int | None = None) -> int:
    """Open a file by its name in a folder that is open already, or a folder; nothing is waited for, as a pipe would."""
    name = path if folder is None else path.name
    try:
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
