"""The files of a checkpoint: safetensors, hashed as they are written; JSON with its own checksum; the manifest.

safetensors' own writer needs all bytes at once; ours writes one tensor at a time, from a snapshot, and hashes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from paceline.checkpoint.shards import first_mistake, is_shard_name, shard_names, world_size_of
from paceline.checkpoint.state import JSON, unflatten
from paceline.core.atomic_write import create_file, is_partial, write_all
from paceline.core.errors import CheckpointError
from paceline.core.regular_file import open_regular

FORMAT = 1
MAX_JSON_BYTES = 1 << 26
"""JSON files of a checkpoint are small; a larger one is refused before it fills memory."""
MODEL, STATE, SKELETON, MANIFEST = "model.safetensors", "state.safetensors", "state.json", "manifest.json"
_CHUNK = 1 << 20
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class TensorFile:
    """The bytes of a safetensors file, one tensor at a time; shared tensors are written once per name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Wide types first, so that every tensor is aligned to its element size.
        self.names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        self.tensors = tensors
        self.offsets: dict[str, int] = {}
        """Where each tensor starts, counted from the end of the header."""
        header, offset = {}, 0
        for name in self.names:
            tensor = tensors[name]
            if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or name == "__metadata__":
                raise TypeError(f"tensor {name!r} cannot be saved ({tensor.dtype}, {tensor.layout})")
            span = (offset, offset + tensor.nbytes)
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
            self.offsets[name], offset = span
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.num_data_bytes = offset
        self.size = len(self.header) + offset

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for name in self.names:
            tensor = self.tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def write_file(path: Path, pieces: Iterable[memoryview]) -> dict[str, Any]:
    """Write a file and sync it to the disk; returns its "size" and "sha256"."""
    digest, size = hashlib.sha256(), 0
    descriptor = create_file(path)
    try:
        for piece in pieces:
            for start in range(0, len(piece), _CHUNK):
                chunk = piece[start : start + _CHUNK]
                digest.update(chunk)
                write_all(descriptor, chunk)
            size += len(piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"size": size, "sha256": digest.hexdigest()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, copied into memory."""
    with path.open("rb") as file:
        return {name: tensor.clone() for name, tensor in map_tensors(path, file.fileno()).items()}


def map_tensors(path: Path, descriptor: int) -> dict[str, Tensor]:
    """The tensors of an open safetensors file, memory-mapped; `path` is for messages."""
    try:
        # By descriptor: the library opens UTF-8 names only.
        return safetensors.torch.load_file(f"/dev/fd/{descriptor}")
    except Exception as error:  # the library raises its own type, and any of torch's
        raise CheckpointError(f"{path}: is not a complete safetensors file: {error}") from error


def dump_checksummed(content: dict[str, JSON]) -> bytes:
    """JSON with a checksum of itself as its last entry."""
    checksum = hashlib.sha256(_dump(content)).hexdigest()
    return _dump({**content, "checksum": checksum})


def load_checksummed(path: Path, raw: bytes | None = None) -> dict[str, JSON]:
    """The content of a JSON file with a checksum, or of its bytes; CheckpointError if one has changed."""
    raw = read_small(path) if raw is None else raw
    content = parse_json(path, raw)
    if not isinstance(content, dict) or "checksum" not in content:
        raise CheckpointError(f"{path}: damaged: expected JSON with a checksum, found {raw[:40]!r}")
    claimed = content.pop("checksum")
    try:
        is_intact = dump_checksummed(content) == raw
    except RecursionError as error:
        raise CheckpointError(f"{path}: damaged: it is nested too deeply") from error
    if not is_intact:
        found = hashlib.sha256(_dump(content)).hexdigest()
        raise CheckpointError(f"{path}: damaged: expected checksum {str(claimed)[:64]}, found {found}")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT}, found {repr(content.get('format'))[:60]}")
    return content


def parse_json(path: Path, raw: bytes) -> JSON:
    """The content of any JSON; `path` is for messages."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: expected JSON, found {raw[:40]!r}") from error


def read_small(path: Path, folder: int | None = None) -> bytes:
    """The content of a small file; `folder` is the descriptor of its folder, if that is open."""
    with open_file(path, folder) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: expected a file of at most {MAX_JSON_BYTES:,} bytes")
    return raw


def open_file(path: Path, folder: int | None = None) -> BinaryIO:
    """A regular file, open for reading; `folder`: see `open_regular`."""
    try:
        return open_regular(path if folder is None else path.name, folder=folder)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _dump(content: dict[str, JSON]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


_OWN_NAMES = frozenset({MODEL, STATE, SKELETON, MANIFEST})
_MAX_INT = 2**63 - 1
_Count = Annotated[int, Field(ge=0, le=_MAX_INT)]
# A user's metric may give any scalar.
_Metric = Annotated[int, Field(ge=-_MAX_INT, le=_MAX_INT)] | float | bool | str | None


class FileEntry(BaseModel):
    """The expected size and digest of a file."""

    model_config = ConfigDict(strict=True, frozen=True)
    size: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """A checkpoint's step, metrics and files."""

    model_config = ConfigDict(strict=True, frozen=True)
    step: _Count
    metrics: dict[str, _Metric]
    files: dict[str, FileEntry]

    @property
    def digest(self) -> str:
        """Equal for checkpoints with equal content; metrics, which may be added later, do not count."""
        return hashlib.sha256(repr((self.step, sorted(self.files.items()))).encode()).hexdigest()


def read_manifest(folder: Path, raw: bytes | None = None) -> Manifest:
    """The manifest of a checkpoint folder, or of its bytes: every value is checked, but not the files."""
    path = folder / MANIFEST
    content = load_checksummed(path, raw)
    try:
        manifest = Manifest.model_validate(content | {"metrics": unflatten({}, content.get("metrics"))})
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_mistake(error)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    _check_names(path, set(manifest.files))
    return manifest


def is_checkpoint_file(name: str) -> bool:
    """Whether a checkpoint may have a file of this name."""
    return name in _OWN_NAMES or is_shard_name(name) or is_partial(name)


def _check_names(path: Path, found: set[str]) -> None:
    unknown = [name for name in found if not is_checkpoint_file(name)]
    world_size = world_size_of(found)
    expected = 3 if world_size == 1 else 3 * world_size + 1
    if unknown or len(found) != expected:
        example = ascii(min(unknown))[:100] if unknown else f"{len(found)} files"
        raise CheckpointError(f"{path}: expected the {expected} files of a checkpoint, found {example}")
    sharded = {name for rank in range(world_size) for name in shard_names(rank, world_size)}
    if missing := sorted(({MODEL, STATE} if world_size == 1 else sharded) - found | {SKELETON} - found):
        raise CheckpointError(f"{path}: expected to list {missing[0]}")
