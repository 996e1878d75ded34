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
from safetensors import SafetensorError
from torch import Tensor

from paceline.checkpoint.state import JSON
from paceline.core.disk import write_all
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
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
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


_LONGEST_SEALED = 1 << 26  # what describes a checkpoint is short; what fills memory is none of it


def seal(content: dict[str, JSON]) -> bytes:
    """JSON that carries a checksum of itself as its last entry."""
    checksum = hashlib.sha256(_dump(content)).hexdigest()
    return _dump({**content, "checksum": checksum})


def unseal(path: Path) -> dict[str, JSON]:
    """The content of a sealed file, if not one byte of it has changed."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LONGEST_SEALED:
            raise CheckpointError(f"{path}: expected a file of at most {_LONGEST_SEALED:,} bytes")
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


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory of their own rather than mapped from it."""
    try:
        return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: is not a whole safetensors file: {error}") from error
