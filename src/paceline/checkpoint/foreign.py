"""Weights of other programs, rewritten as safetensors; nothing in their files is ever executed."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.files import TensorFile, write_file
from paceline.checkpoint.weights import read_weights
from paceline.core.disk import sync_folder
from paceline.core.errors import CheckpointError


@dataclass(frozen=True)
class Converted:
    """What a converted file holds."""

    num_tensors: int
    size: int


def convert(source: Path, out: Path, max_bytes: int) -> Converted:
    """Write the tensors of a torch file to `out`, completely or not at all; what is larger than allowed is refused."""
    if source.is_dir():
        raise CheckpointError(f"{source}: is a folder; expected a file of weights, such as a .pth, .pt or .bin")
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out}: exists and is not overwritten; move it away, or name another file with --out")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out}: there is no folder {out.parent}")
    _refuse_more_than(max_bytes, _unpacked_size(source), source)
    weights = read_weights(source)
    content = _as_file(source, weights)
    # A few bytes may describe a tensor of any size: one number repeated, for instance.
    _refuse_more_than(max_bytes, content.size, source)
    aside = out.with_name(f".{out.name}.partial")
    try:
        write_file(aside, content)
        aside.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{out}: cannot be written ({content.size:,} bytes are needed): {error}") from error
    return Converted(len(weights), content.size)


def _unpacked_size(path: Path) -> int:
    """What the file takes in memory at least, as it says itself; 0 for one that is not there or cannot be read."""
    try:
        if path.is_file() and zipfile.is_zipfile(path):  # a pipe would be waited for
            with zipfile.ZipFile(path) as archive:
                return sum(entry.file_size for entry in archive.infolist())
        return path.stat().st_size
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError):
        return 0


def _refuse_more_than(most: int, num_bytes: int, path: Path) -> None:
    if num_bytes > most:
        raise CheckpointError(
            f"{path}: unpacks to {num_bytes / 1e9:.3g} GB, more than the {most / 1e9:.3g} GB allowed;"
            " where the file can be trusted, raise --max-gb"
        )


def _as_file(path: Path, weights: dict[str, Tensor]) -> TensorFile:
    without_data = [name for name, tensor in weights.items() if tensor.is_meta]
    if without_data:
        raise CheckpointError(f"{path}: {without_data[0]} has a shape but no data")
    try:
        return TensorFile(weights)
    except TypeError as error:
        raise CheckpointError(f"{path}: {error}; safetensors has no such type") from error
