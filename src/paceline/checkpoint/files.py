"""Bytes on the disk: tensors as safetensors, files hashed on their way through, JSON that carries its checksum."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from paceline.checkpoint.state import JSON
from paceline.core.atomic_write import create_file, write_all
from paceline.core.errors import CheckpointError

FORMAT = 1
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
        self.offsets: dict[str, int] = {}
        """Where each tensor begins, counted from the end of the header."""
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
    """Write a file through to the disk; its size and SHA-256."""
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


MOST_JSON_BYTES = 1 << 26
"""What describes a checkpoint is short; what fills memory is none of it."""


def seal(content: dict[str, JSON]) -> bytes:
    """JSON that carries a checksum of itself as its last entry."""
    checksum = hashlib.sha256(_dump(content)).hexdigest()
    return _dump({**content, "checksum": checksum})


def unseal(path: Path) -> dict[str, JSON]:
    """The content of a sealed file, if not one byte of it has changed."""
    return parse_sealed(path, read_small(path))


def parse_sealed(path: Path, raw: bytes) -> dict[str, JSON]:
    """As `unseal`, of what was read; `path` is for messages."""
    content = parse_json(path, raw)
    if not isinstance(content, dict) or "checksum" not in content:
        raise CheckpointError(f"{path}: damaged: expected JSON with a checksum, found {raw[:40]!r}")
    claimed = content.pop("checksum")
    try:
        is_whole = seal(content) == raw
    except RecursionError as error:
        raise CheckpointError(f"{path}: damaged: it is nested too deeply") from error
    if not is_whole:
        found = hashlib.sha256(_dump(content)).hexdigest()
        raise CheckpointError(f"{path}: damaged: expected checksum {str(claimed)[:64]}, found {found}")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT}, found {repr(content.get('format'))[:60]}")
    return content


def parse_json(path: Path, raw: bytes) -> JSON:
    """JSON of any content; `path` is for messages."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: expected JSON, found {raw[:40]!r}") from error


def read_small(path: Path, folder: int | None = None) -> bytes:
    """All of a small file; `folder` is the one that it lies in, if that is open already."""
    try:
        # Without blocking, or a pipe would be waited for until somebody writes into it.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path if folder is None else path.name, flags, dir_fd=folder)
        try:
            status = os.fstat(descriptor)
            is_small = stat.S_ISREG(status.st_mode) and status.st_size <= MOST_JSON_BYTES
            raw = os.pread(descriptor, status.st_size, 0) if is_small else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not is_small:
        raise CheckpointError(f"{path}: expected a file of at most {MOST_JSON_BYTES:,} bytes")
    return raw


def _dump(content: dict[str, JSON]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory of their own rather than mapped from it."""
    return {name: tensor.clone() for name, tensor in map_tensors(path).items()}


def map_tensors(path: Path, descriptor: int | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped from it; `descriptor` is where it is open, if it is."""
    try:
        if descriptor is None:
            with path.open("rb") as file:
                return map_tensors(path, file.fileno())
        # By its descriptor, since the library opens names in UTF-8 alone.
        return safetensors.torch.load_file(f"/dev/fd/{descriptor}")
    except CheckpointError:
        raise
    except Exception as error:  # besides its own type, the library raises whatever torch does
        raise CheckpointError(f"{path}: is not a whole safetensors file: {error}") from error
