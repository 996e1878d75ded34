"""What a checkpoint folder says of itself: checked, value by value, before anything in it is believed."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.files import parse_sealed, read_small
from paceline.checkpoint.shards import is_part_name, part_names, world_of
from paceline.checkpoint.state import unflatten
from paceline.core.atomic_write import is_partial
from paceline.core.errors import CheckpointError

MODEL, STATE, SKELETON, MANIFEST = "model.safetensors", "state.safetensors", "state.json", "manifest.json"
_OUR_NAMES = frozenset({MODEL, STATE, SKELETON, MANIFEST})
_SHA256 = re.compile(r"[0-9a-f]{64}")
LARGEST = 2**63 - 1
"""Steps and sizes are 64-bit integers wherever they go."""


class FileEntry(NamedTuple):
    """What a file is expected to be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's step, its metrics, and what each of its files is expected to be."""

    step: int
    metrics: dict[str, float]
    files: dict[str, FileEntry]

    @property
    def digest(self) -> str:
        """The same for checkpoints of the same content, wherever they are; metrics may be entered later."""
        return hashlib.sha256(repr((self.step, sorted(self.files.items()))).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked in itself but not yet against the files."""
    path = folder / MANIFEST
    return parse_manifest(path, read_small(path))


def parse_manifest(path: Path, raw: bytes) -> Manifest:
    """As `read_manifest`, of what was read; `path` is for messages."""
    content = parse_sealed(path, raw)
    try:
        files = {name: _entry(name, entry) for name, entry in _mapping("files", content.get("files")).items()}
        metrics = _mapping("metrics", unflatten({}, content.get("metrics")))
        metrics = {name: _figure(name, value) for name, value in metrics.items()}
        step = _count("step", content.get("step"))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    _check_names(path, set(files))
    return Manifest(step, metrics, files)


def is_ours(name: str) -> bool:
    """Whether a file of a checkpoint may be called so."""
    return name in _OUR_NAMES or is_part_name(name) or is_partial(name)


def _check_names(path: Path, found: set[str]) -> None:
    strangers = [name for name in found if not is_ours(name)]
    world = world_of(found)
    expected = 3 if world == 1 else 3 * world + 1
    if strangers or len(found) != expected:
        shown = ascii(min(strangers))[:100] if strangers else f"{len(found)} files"
        raise CheckpointError(f"{path}: expected the {expected} files of a checkpoint, found {shown}")
    wanted = {MODEL, STATE} if world == 1 else {name for rank in range(world) for name in part_names(rank, world)}
    if missing := sorted((wanted | {SKELETON}) - found):
        raise CheckpointError(f"{path}: expected to list {missing[0]}")


def _entry(name: str, value: Any) -> FileEntry:
    entry = _mapping(f"files.{name}", value)
    sha256 = entry.get("sha256")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _unexpected(f"files.{name}.sha256", "64 hexadecimal digits", sha256)
    return FileEntry(_count(f"files.{name}.size", entry.get("size")), sha256)


def _figure(name: str, value: Any) -> float:
    is_too_large = isinstance(value, int) and abs(value) > LARGEST
    if is_too_large or not isinstance(value, int | float | str | None):  # a user's metric may give any scalar
        raise _unexpected(f"metrics.{name}", "a number", value)
    return value  # type: ignore[return-value]


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise _unexpected(name, "a whole number from 0 up", value)
    return value


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unexpected(name, "an object", value)
    return value


def _unexpected(name: str, expected: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{name[:100]}: expected {expected}, found {repr(value)[:60]}")
