"""The files of one checkpoint folder: written once and hashed on the way, verified before they are used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline import __version__
from paceline.checkpoint.state import JSON, Tree, flatten, unflatten
from paceline.core.errors import CheckpointError

FORMAT = 1
MODEL, STATE, SKELETON, MANIFEST = "model.safetensors", "state.safetensors", "state.json", "manifest.json"
OUR_NAMES = frozenset({MODEL, STATE, SKELETON, MANIFEST})
_CHUNK = 1 << 20
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class TensorFile:
    """Tensors as the bytes of a safetensors file, one at a time: shared ones once for each name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Wide types first, so that every tensor begins at a multiple of its element's size.
        self.names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self.tensors = tensors
        header, offset = {}, 0
        for name in self.names:
            tensor = tensors[name]
            if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or name == "__metadata__":
                raise TypeError(f"tensor {name!r} cannot be saved ({tensor.dtype}, {tensor.layout})")
            span = [offset, offset + tensor.nbytes]
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
            offset = span[1]
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + offset

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for name in self.names:
            tensor = self.tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Manifest:
    """What a folder says of itself: its step, its figures, and the size and SHA-256 of each of its files."""

    step: int
    figures: dict[str, float]
    files: dict[str, dict[str, Any]]


class Folder:
    """The content of one checkpoint, ready to be written; whatever cannot be saved is refused here."""

    def __init__(self, step: int, model: Mapping[str, Tensor], state: Tree, figures: Mapping[str, float]) -> None:
        tensors, skeleton = flatten(state)
        strays, self.figures = flatten(figures)
        if strays:
            raise TypeError(f"figures must be numbers, found tensors: {', '.join(strays)}")
        self.step = step
        self.model, self.state = TensorFile(model), TensorFile(tensors)
        self.skeleton = json.dumps(skeleton, allow_nan=False).encode()
        self.size = self.model.size + self.state.size + len(self.skeleton)

    def write(self, path: Path) -> None:
        """Make the folder at `path`; the manifest comes last, and everything is on the disk on return."""
        path.mkdir()
        parts: dict[str, Iterable[memoryview]] = {
            MODEL: self.model,
            STATE: self.state,
            SKELETON: [memoryview(self.skeleton)],
        }
        manifest = {
            "format": FORMAT,
            "paceline": __version__,
            "torch": torch.__version__,
            "step": self.step,
            "figures": self.figures,
            "files": {name: write_file(path / name, pieces) for name, pieces in parts.items()},
        }
        write_file(path / MANIFEST, [memoryview(seal(manifest))])
        sync_folder(path)


def write_file(path: Path, pieces: Iterable[memoryview]) -> dict[str, Any]:
    """Write a file through to the disk; its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK):
                chunk = piece[start : start + _CHUNK]
                file.write(chunk)
                digest.update(chunk)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file aside and rename it: a reader finds the old content or the new, never a part."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        write_file(aside, [memoryview(content)])
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(content: dict[str, JSON]) -> bytes:
    """JSON that carries a checksum of itself as its last entry."""
    checksum = hashlib.sha256(_dump(content)).hexdigest()
    return _dump({**content, "checksum": checksum})


def unseal(path: Path) -> dict[str, JSON]:
    """The content of a sealed file, if not one byte of it has changed."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        content = json.loads(raw)
        claimed = content.pop("checksum")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: expected JSON with a checksum, found {raw[:40]!r}") from error
    if seal(content) != raw:
        found = hashlib.sha256(_dump(content)).hexdigest()
        raise CheckpointError(f"{path}: damaged: expected checksum {claimed}, found {found}")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT}, found {content.get('format')}")
    return dict(content)


def _dump(content: dict[str, JSON]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked in itself but not yet against the files."""
    path = folder / MANIFEST
    content = unseal(path)
    try:
        files = {name: {"size": int(f["size"]), "sha256": str(f["sha256"])} for name, f in content["files"].items()}
        manifest = Manifest(int(content["step"]), dict(unflatten({}, content["figures"])), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not the manifest of a checkpoint") from error
    if set(files) != OUR_NAMES - {MANIFEST}:
        expected = ", ".join(sorted(OUR_NAMES - {MANIFEST}))
        raise CheckpointError(f"{path}: expected to list {expected}; found {', '.join(sorted(files))}")
    return manifest


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder after every file was found to be what it says."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["size"]:
                raise CheckpointError(f"{path}: damaged: expected {expected['size']} bytes, found {size}")
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        if found != expected["sha256"]:
            raise CheckpointError(f"{path}: damaged: expected SHA-256 {expected['sha256']}, found {found}")
    return manifest


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory of their own rather than mapped from it."""
    try:
        return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: is not a whole safetensors file: {error}") from error


def read_state(folder: Path) -> Tree:
    """The state tree of a verified checkpoint folder."""
    skeleton = json.loads((folder / SKELETON).read_bytes())
    return unflatten(read_tensors(folder / STATE), skeleton)


def holds_only_ours(path: Path) -> bool:
    """Whether a folder is real and holds nothing but files with the names that a checkpoint has."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(item.name in OUR_NAMES and item.is_file() and not item.is_symlink() for item in path.iterdir())


def remove(path: Path) -> None:
    """Delete a folder of ours; one that holds anything else stays as it is."""
    if holds_only_ours(path):
        for name in OUR_NAMES:
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def retire(replaced: Path, successor: Path) -> None:
    """Delete a folder that was replaced; what others put into it moves to its successor."""
    for item in list(replaced.iterdir()):
        if item.name not in OUR_NAMES and not (successor / item.name).exists():
            item.rename(successor / item.name)
    remove(replaced)
