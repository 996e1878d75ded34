"""Weights files of any origin, told apart by content; nothing in a file is ever executed."""

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

from paceline.checkpoint.best import named_in
from paceline.checkpoint.files import TensorFile, read_tensors, write_file
from paceline.checkpoint.pretrained import find_published, is_published_name
from paceline.checkpoint.store import open_checkpoint
from paceline.core.atomic_write import partial_path, sync_folder
from paceline.core.errors import CheckpointError
from paceline.core.text import join_first, pluralize

_CONTAINERS = ("state_dict", "model", "model_state_dict")
_WRAPPER = "module."
_DEEPEST = 8  # a dict may hold itself
_LONGEST_HEADER = 100_000_000
_ZIP = b"PK\x03\x04"
_PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


@dataclass(frozen=True)
class FoundWeights:
    """Tensors by name, and the file or the checkpoint folder that they are from."""

    path: Path
    tensors: dict[str, Tensor]

    @property
    def digest(self) -> str:
        """The same for the same tensors under the same names."""
        found = hashlib.sha256()
        for piece in TensorFile(self.tensors):
            found.update(piece)
        return found.hexdigest()


def read_weights(source: Path | str, key: str | None = None) -> dict[str, Tensor]:
    """The tensors of `find_weights`."""
    return find_weights(source, key).tensors


def find_weights(source: Path | str, key: str | None = None) -> FoundWeights:
    """Tensors by name from safetensors, a torch file, a run directory or checkpoint folder of ours, or a library.

    A library's are named `timm/<model>[.<tag>]` or `torchvision/<model>[.<WEIGHTS>]`; they come from its cache if
    it has them, else over the network. `key` names what holds the tensors in a torch file, dots lead further inside.
    """
    if isinstance(source, str) and is_published_name(source):
        published = find_published(source)
        return FoundWeights(published.file, published.convert(_read_path(published.file)))
    if Path(source).is_dir() or named_in(Path(source)) is not None:
        checkpoint = open_checkpoint(Path(source))
        return FoundWeights(checkpoint.path, checkpoint.model)
    return FoundWeights(Path(source), _read_path(Path(source), key))


def _read_path(path: Path, key: str | None = None) -> dict[str, Tensor]:
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or directory")
    if not path.is_file():
        raise CheckpointError(f"{path}: is a pipe or a device; expected a file of weights")
    try:
        with path.open("rb") as file:
            start = file.read(9)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size == 0:
        raise CheckpointError(f"{path}: is empty; expected weights")
    content = _read(path, start, size)
    return _without_wrapper(_tensors(path, content if key is None else _at_key(path, content, key)))


def _read(path: Path, start: bytes, size: int) -> Any:
    header = int.from_bytes(start[:8], "little")
    if start[8:] == b"{" and header <= _LONGEST_HEADER:
        if size < 8 + header:
            raise CheckpointError(f"{path}: is truncated: its header alone needs {8 + header} bytes, found {size}")
        return read_tensors(path)
    if start.startswith(_ZIP):
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path}: is truncated: a torch file whose end is missing ({size} bytes)")
        _refuse_packed(path, size)
        return _read_torch(path)
    if start.startswith(_PICKLES):
        return _read_torch(path)
    raise CheckpointError(
        f"{path}: is neither a safetensors nor a torch file: it begins with {start!r} and has {pluralize(size, 'byte')}"
    )


def _refuse_packed(path: Path, size: int) -> None:
    """Torch does not pack what it saves: an archive that unpacks to more than it is was made to fill memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from error
    if unpacked > size:
        raise CheckpointError(f"{path}: refused: its {size:,} bytes unpack to {unpacked:,}, and torch packs nothing")


def _read_torch(path: Path) -> Any:
    try:
        # Many training programs save their parsed flags beside the weights: plain data, though of a named class.
        flags = torch.serialization.safe_globals([argparse.Namespace])
        with path.open("rb") as file, warnings.catch_warnings(), flags:
            warnings.simplefilter("ignore")  # what they say is said by the errors below
            # Given a path instead of a file, torch would go by its extension.
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise almost any type
        raise CheckpointError(f"{path}: {_explained(error)}") from error


def _explained(error: Exception) -> str:
    """Torch's reason in other words: its own advise to switch the protection off."""
    text = str(error)
    if code := re.search(r"GLOBAL (\w[\w.]*\w) ", text):
        return (
            f"refused: reading it would need the code {code[1]}, and a file that brings code can do anything "
            "on your machine. Weights are read with weights_only, which protects you from that. "
            "Expected tensors alone: where the file can be trusted, save its state dict as safetensors"
        )
    if "TorchScript" in text:
        return "is a TorchScript program; expected tensors alone: save its state dict as safetensors"
    if isinstance(error, pickle.UnpicklingError):
        reason = re.search(r"WeightsUnpickler error:\s*(\S.*)", text)
        text = reason[1] if reason else "it holds more than plain data"
    first_line = (text or type(error).__name__).splitlines()[0]
    return f"is damaged, truncated or not made by torch.save: {first_line}"


def _tensors(path: Path, content: Any, depth: int = 0) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected tensors by name, found a {type(content).__name__}")
    if depth > _DEEPEST:
        raise CheckpointError(f"{path}: expected tensors by name, found dicts in dicts more than {_DEEPEST} deep")
    for container in _CONTAINERS:
        if isinstance(content.get(container), dict):
            return _tensors(path, content[container], depth + 1)
    if not content:
        raise CheckpointError(f"{path}: holds no tensors")
    others = [repr(key) for key, value in content.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if others:
        found = _candidates(content) or f"found other things, such as {', '.join(others[:5])}"
        raise CheckpointError(f"{path}: expected tensors by name, alone or under {', '.join(_CONTAINERS)}; {found}")
    return {name: tensor.detach() for name, tensor in content.items()}


def _at_key(path: Path, content: Any, key: str) -> Any:
    """What a file holds under a key; dots lead into dicts inside of it, unless the key itself has them."""
    inside, rest = content, key
    while isinstance(inside, dict) and rest:
        words = rest.split(".")
        names = [".".join(words[:end]) for end in range(len(words), 0, -1)]
        name = next((name for name in names if name in inside), None)
        if name is None:
            break
        inside, rest = inside[name], rest.removeprefix(name).removeprefix(".")
    if rest:
        held = _candidates(content) or f"it holds {join_first([*content], 10) if isinstance(content, dict) else 'none'}"
        raise CheckpointError(f"{path}: has no key {key!r}; {held}")
    return inside


def _candidates(content: Any) -> str:
    """The keys of a file that hold tensors by name, in words; empty if there are none."""
    found = [f"{key} ({pluralize(number, 'tensor')})" for key, number in _keys_of_tensors(content, "", set())]
    return f"found some under {join_first(found, 5)}: name one as model.weights.key" if found else ""


def _keys_of_tensors(content: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if not isinstance(content, dict) or id(content) in seen:  # a dict may hold itself
        return
    seen.add(id(content))
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(key, str):
            number = sum(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items())
            if number and number == len(value):
                yield prefix + key, number
            else:
                yield from _keys_of_tensors(value, f"{prefix}{key}.", seen)


def _without_wrapper(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if all(name.startswith(_WRAPPER) for name in weights):
        return {name.removeprefix(_WRAPPER): tensor for name, tensor in weights.items()}
    return weights


@dataclass(frozen=True)
class Converted:
    """What a converted file holds."""

    num_tensors: int
    size: int


def convert(source: Path, out: Path, max_bytes: int, key: str | None = None) -> Converted:
    """Write the tensors of a torch file to `out`, completely or not at all; what is larger than allowed is refused."""
    if source.is_dir():
        raise CheckpointError(f"{source}: is a folder; expected a file of weights, such as a .pth, .pt or .bin")
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out}: exists and is not overwritten; move it away, or name another file with --out")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out}: there is no folder {out.parent}")
    _refuse_more_than(max_bytes, _unpacked_size(source), source)
    weights = read_weights(source, key)
    content = _as_file(source, weights)
    # A few bytes may describe a tensor of any size: one number repeated, for instance.
    _refuse_more_than(max_bytes, content.size, source)
    aside = partial_path(out)
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
