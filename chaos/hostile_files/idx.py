"""IDX files that claim more than they hold."""

from __future__ import annotations

import gzip
import io
import os
import struct
from pathlib import Path

from chaos.hostile_files.case import Cases
from chaos.hostile_files.commands import check

case = Cases()


def check_idx(images: bytes, name: str = "train-images-idx3-ubyte") -> list[str]:
    """The command that checks a recipe whose IDX file of images has this content."""
    Path("idx").mkdir()
    Path("idx", name).write_bytes(images)
    Path("idx/train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 4) + bytes(4))
    return check(data={"train": {"dataset": "idx", "root": "idx", "split": "train"}})


@case("an IDX file that claims 2^96 bytes", 3)
def _() -> list[str]:
    return check_idx(struct.pack(">IIII", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1) + bytes(64))


@case("an IDX file that is a gzip bomb", 3)
def _() -> list[str]:
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", compresslevel=1) as packed:
        packed.write(struct.pack(">IIII", 0x803, 4, 1 << 14, 1 << 14))
        for _ in range(64):
            packed.write(bytes(1 << 24))
    return check_idx(content.getvalue(), "train-images-idx3-ubyte.gz")


@case("a pipe as an IDX file", 3)
def _() -> list[str]:
    command = check_idx(b"")
    Path("idx/train-images-idx3-ubyte").unlink()
    os.mkfifo("idx/train-images-idx3-ubyte")
    return command
