"""Weights whose sizes lie, and what is no file of weights."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile

from chaos.hostile_files.case import Cases
from chaos.hostile_files.commands import check, check_weights

case = Cases()


def _safetensors(header: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def _described(**tensors: tuple[list[int], list[int]]) -> bytes:
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": offsets} for name, (shape, offsets) in tensors.items()
    }
    return json.dumps(entries).encode()


@case("a safetensors header of 2^63 bytes", 4)
def _() -> list[str]:
    return check_weights(_safetensors(b"{}", length=2**63), "weights.safetensors")


@case("a safetensors header longer than its file", 4)
def _() -> list[str]:
    return check_weights(_safetensors(b"{}", length=90_000_000), "weights.safetensors")


@case("safetensors that overlap", 4)
def _() -> list[str]:
    return check_weights(_safetensors(_described(a=([4], [0, 16]), b=([4], [8, 24])), bytes(24)))


@case("safetensors beyond the end of the file", 4)
def _() -> list[str]:
    return check_weights(_safetensors(_described(a=([1 << 40], [0, 1 << 42])), bytes(16)))


@case("a safetensors shape that overflows", 4)
def _() -> list[str]:
    return check_weights(_safetensors(_described(a=([2**32, 2**32, 2**32], [0, 16])), bytes(16)))


@case("a safetensors header a hundred thousand deep", 4)
def _() -> list[str]:
    return check_weights(_safetensors(b'{"a":' * 100_000))


@case("a zip bomb as weights", 4)
def _() -> list[str]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data.pkl", "w") as entry:
            for _ in range(64):
                entry.write(bytes(1 << 24))
        archive.writestr("archive/version", "3\n")
    return check_weights(content.getvalue())


@case("a zip entry that lies about its size", 4)
def _() -> list[str]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 64)
        archive.writestr("archive/version", "3\n")
    sizes = struct.pack("<II", 64, 64)
    return check_weights(content.getvalue().replace(sizes, struct.pack("<II", 64, 0x7FFFFFFF)))


@case("weights that claim a terabyte", 4)
def _() -> list[str]:
    import torch

    content = io.BytesIO()
    torch.save({"weight": torch.zeros(3)}, content, _use_new_zipfile_serialization=False)
    # The number of elements of the storage, as the pickle writes it.
    return check_weights(content.getvalue().replace(b"K\x03Ntq", b"\x8a\x06\0\0\0\0\0\x01Ntq"))


@case("a pipe as weights", 4)
def _() -> list[str]:
    os.mkfifo("weights.pth")
    return check(model={"name": "convnet", "widths": [4], "weights": "weights.pth"})


@case("a device as weights", 4)
def _() -> list[str]:
    return check(model={"name": "convnet", "widths": [4], "weights": "/dev/zero"})
