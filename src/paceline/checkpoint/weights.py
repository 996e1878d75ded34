"""Weights files of any origin, recognized by content; nothing in a file is ever executed."""

from __future__ import annotations

import argparse
import hashlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.best import read_pointer
from paceline.checkpoint.files import TensorFile, read_tensors, write_file
from paceline.checkpoint.pretrained import find_pretrained, is_pretrained_name, transformers_file
from paceline.checkpoint.reader import open_checkpoint
from paceline.core.atomic_write import partial_path, sync_folder
from paceline.core.errors import CheckpointError
from paceline.core.text import join_first, pluralize

_CONTAINERS = ("state_dict", "model", "model_state_dict")
_WRAPPER = "module."
_MAX_DEPTH = 8  # a dict may contain itself
_MAX_HEADER_BYTES = 100_000_000
_ZIP = b"PK\x03\x04"
_PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


@dataclass(frozen=True)
class FoundWeights:
    """Tensors by name, and the file or checkpoint folder they come from."""

    path: Path
    tensors: dict[str, Tensor]

    @property
    def digest(self) -> str:
        """Equal for equal tensors with equal names."""
        found = hashlib.sha256()
        for piece in TensorFile(self.tensors):
            found.update(piece)
        return found.hexdigest()


def read_weights(source: Path | str, key: str | None = None) -> dict[str, Tensor]:
    """The tensors of `find_weights`."""
    return find_weights(source, key).tensors


def find_weights(source: Path | str, key: str | None = None) -> FoundWeights:
    """Tensors by name from safetensors, a torch file, a run directory, a checkpoint folder or a library.

    Libraries' weights are `timm/<model>[.<tag>]` and `torchvision/<model>[.<WEIGHTS>]`, from the library's cache or
    downloaded; those of transformers are a folder as its `save_pretrained` writes it, or `transformers/<id>`, from the
    hub's cache. `key` selects the entry of a torch file that holds the tensors; dots lead into nested dicts.
    """
    if isinstance(source, str) and is_pretrained_name(source):
        pretrained = find_pretrained(source)
        return FoundWeights(pretrained.file, pretrained.convert(_read_path(pretrained.file)))
    if (Path(source) / "config.json").is_file():
        pretrained = transformers_file(str(source))
        return FoundWeights(pretrained.file, pretrained.convert(_read_path(pretrained.file)))
    if Path(source).is_dir() or read_pointer(Path(source)) is not None:
        checkpoint = open_checkpoint(Path(source))
        return FoundWeights(checkpoint.path, checkpoint.model)
    return FoundWeights(Path(source), _read_path(Path(source), key))


def _read_path(path: Path, key: str | None = None) -> dict[str, Tensor]:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a regular file; expected a weights file")
    try:
        with path.open("rb") as file:
            start = file.read(9)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size == 0:
        raise CheckpointError(f"{path}: is empty; expected weights")
    content = _read(path, start, size)
    weights = _tensors(path, content if key is None else _at_key(path, content, key))
    is_wrapped = all(name.startswith(_WRAPPER) for name in weights)
    return {name.removeprefix(_WRAPPER) if is_wrapped else name: tensor for name, tensor in weights.items()}


def _read(path: Path, start: bytes, size: int) -> Any:
    header = int.from_bytes(start[:8], "little")
    if start[8:] == b"{" and header <= _MAX_HEADER_BYTES:
        if size < 8 + header:
            raise CheckpointError(f"{path}: is truncated: its header alone needs {8 + header} bytes, found {size}")
        return read_tensors(path)
    if start.startswith(_ZIP):
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path}: is truncated: a torch file whose end is missing ({size} bytes)")
        if (unpacked := _unpacked_size(path)) > size:  # made to fill memory
            raise CheckpointError(
                f"{path}: refused: its {size:,} bytes expand to {unpacked:,}, and torch compresses nothing"
            )
        return _read_torch(path)
    if start.startswith(_PICKLES):
        return _read_torch(path)
    raise CheckpointError(
        f"{path}: is neither a safetensors nor a torch file: it starts with {start!r} and has {pluralize(size, 'byte')}"
    )


def _read_torch(path: Path) -> Any:
    try:
        # Many training scripts save their parsed flags with the weights: plain data of a named class.
        flags = torch.serialization.safe_globals([argparse.Namespace])
        with path.open("rb") as file, warnings.catch_warnings(), flags:
            warnings.simplefilter("ignore")  # the errors below say it
            # Given a path, torch would go by its extension.
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise almost any type
        raise CheckpointError(f"{path}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    """torch's reason in other words, since torch advises to switch the protection off."""
    text = str(error)
    if code := re.search(r"GLOBAL (\w[\w.]*\w) ", text):
        return (
            f"refused: loading it would run {code[1]}, and a file that runs code can do anything on your machine. "
            "Weights are loaded with weights_only=True, which prevents that. Expected tensors only: if you trust the "
            "file, save its state dict as safetensors"
        )
    if "TorchScript" in text:
        return "is a TorchScript program; expected tensors only: save its state dict as safetensors"
    if isinstance(error, pickle.UnpicklingError):
        reason = re.search(r"WeightsUnpickler error:\s*(\S.*)", text)
        text = reason[1] if reason else "it contains more than plain data"
    first_line = (text or type(error).__name__).splitlines()[0]
    return f"is damaged, truncated or not made by torch.save: {first_line}"


def _tensors(path: Path, content: Any, depth: int = 0) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected tensors by name, found a {type(content).__name__}")
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{path}: expected tensors by name, found dicts nested more than {_MAX_DEPTH} deep")
    for container in _CONTAINERS:
        if isinstance(content.get(container), dict):
            return _tensors(path, content[container], depth + 1)
    if not content:
        raise CheckpointError(f"{path}: contains no tensors")
    others = [repr(key) for key, value in content.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if others:
        found = _candidates(content) or f"found other entries, such as {join_first(others, 5)}"
        raise CheckpointError(f"{path}: expected tensors by name, alone or under {', '.join(_CONTAINERS)}; {found}")
    return {name: tensor.detach() for name, tensor in content.items()}


def _at_key(path: Path, content: Any, key: str) -> Any:
    """The entry of a file under a key; dots lead into nested dicts, unless the key itself has them."""
    inside, rest = content, key
    while isinstance(inside, dict) and rest:
        words = rest.split(".")
        names = [".".join(words[:end]) for end in range(len(words), 0, -1)]
        name = next((name for name in names if name in inside), None)
        if name is None:
            break
        inside, rest = inside[name], rest.removeprefix(name).removeprefix(".")
    if rest:
        held = (
            _candidates(content) or f"it contains {join_first([*content], 10) if isinstance(content, dict) else 'none'}"
        )
        raise CheckpointError(f"{path}: has no key {key!r}; {held}")
    return inside


def _candidates(content: Any) -> str:
    """The keys of a file with tensors by name, as text; empty without any."""
    found = [f"{key} ({pluralize(number, 'tensor')})" for key, number in _keys_of_tensors(content, "", set())]
    return f"found tensors under {join_first(found, 5)}: set one as model.weights.key" if found else ""


def _keys_of_tensors(content: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if not isinstance(content, dict) or id(content) in seen:  # a dict may contain itself
        return
    seen.add(id(content))
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(key, str):
            number = sum(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items())
            if number and number == len(value):
                yield prefix + key, number
            else:
                yield from _keys_of_tensors(value, f"{prefix}{key}.", seen)


@dataclass(frozen=True)
class Converted:
    """The content of a converted file."""

    num_tensors: int
    size: int


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def convert(
    source: Path, out: Path, max_bytes: int, key: str | None = None, dtype: torch.dtype | None = None
) -> Converted:
    """Write the tensors of a torch file to `out`, atomically; refuses more than `max_bytes`.

    With `dtype`, float tensors that are wider are rounded to it.
    """
    if source.is_dir():
        raise CheckpointError(f"{source}: is a folder; expected a weights file, such as a .pth, .pt or .bin")
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out}: exists and is not overwritten; move it, or choose another file with --out")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out}: the folder {out.parent} does not exist")
    if source.is_file():  # opening a pipe would wait
        _check_size(max_bytes, _unpacked_size(source), source)
    weights = read_weights(source, key)
    if dtype is not None:
        weights = {name: to_half(source, name, tensor, dtype) for name, tensor in weights.items()}
    content = _as_file(source, weights)
    # A few bytes may describe a tensor of any size, such as one repeated number.
    _check_size(max_bytes, content.size, source)
    partial = partial_path(out)
    try:
        write_file(partial, content)
        partial.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{out}: cannot be written ({content.size:,} bytes are needed): {error}") from error
    return Converted(len(weights), content.size)


def to_half(path: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor rounded to half precision if it holds wider floats; raises if values are too large for that."""
    if not tensor.is_floating_point() or tensor.element_size() <= dtype.itemsize or tensor.is_meta:
        return tensor
    half = tensor.to(dtype)
    if bool((half.isinf() & tensor.isfinite()).any()):
        largest = float(tensor[tensor.isfinite()].abs().max())
        raise CheckpointError(
            f"{path}: {name} has values up to {largest:g}, more than {str(dtype).removeprefix('torch.')} can hold;"
            " use --dtype bf16"
        )
    return half


def _unpacked_size(path: Path) -> int:
    """The least memory that the file needs, by its own header."""
    try:
        if not zipfile.is_zipfile(path):
            return path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from error


def _check_size(most: int, num_bytes: int, path: Path) -> None:
    if num_bytes > most:
        raise CheckpointError(
            f"{path}: expands to {num_bytes / 1e9:.3g} GB, more than the {most / 1e9:.3g} GB allowed;"
            " if you trust the file, raise --max-gb"
        )


def _as_file(path: Path, weights: dict[str, Tensor]) -> TensorFile:
    without_data = [name for name, tensor in weights.items() if tensor.is_meta]
    if without_data:
        raise CheckpointError(f"{path}: {without_data[0]} has a shape but no data")
    try:
        return TensorFile(weights)
    except TypeError as error:
        raise CheckpointError(f"{path}: {error}; safetensors has no such type") from error
