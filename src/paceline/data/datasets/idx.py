"""IDX files of the MNIST family, and the small part of Fashion-MNIST that ships with the package."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from paceline.core.arguments import Count
from paceline.core.errors import ArgumentError, DataError
from paceline.core.registry import register
from paceline.core.regular_file import first_file, open_regular
from paceline.data.argument_types import Name
from paceline.data.batch import Sample
from paceline.data.fingerprint import DataDigest

Split = Literal["train", "test"]

DIGITS = tuple("0123456789")
_PREFIXES: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("t10k", "test")}
_BYTES = 0x08  # the type code of unsigned bytes, the only one that images and labels have
_MAX_RATIO = 100  # pixels and labels do not pack tighter; something that does is made to fill memory
_FREE = 1 << 26  # bytes that may pack as they like


@register.dataset("idx")
def idx(
    root: Path,
    split: Split,
    classes: Annotated[Sequence[Name], Field(min_length=1)] | None = None,
    samples_per_class: Count | None = None,
) -> MemoryImages:
    """The gray images and labels of one split of a folder of IDX files, packed with gzip or not.

    Label k means classes[k]; without `classes` there are ten, named by their digits. `samples_per_class` keeps only the
    first so many images of each class, to train with few labels.
    """
    names = list(DIGITS if classes is None else classes)
    images_path = _find(Path(root), split, "images-idx3-ubyte")
    labels_path = _find(Path(root), split, "labels-idx1-ubyte")
    images, labels = _read(images_path, dimensions=3), _read(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} holds {len(images)} images but {labels_path} holds {len(labels)} labels: "
            "each image needs one label, so the two files do not belong together"
        )
    if images.numel() == 0:
        raise DataError(f"{images_path}: holds no images (its header says {_by(images.shape)})")
    if int(labels.max()) >= len(names):
        raise DataError(
            f"{labels_path}: the largest label is {int(labels.max())} but there are {len(names)} classes "
            f"(labels 0 to {len(names) - 1}): give the names of all classes as `classes`"
        )
    if samples_per_class is not None:
        first = _first_of_each(labels, samples_per_class, labels_path)
        images, labels = images[first], labels[first]
    return MemoryImages(images.unsqueeze(1), {"label": labels.long()}, names)


def _first_of_each(labels: Tensor, number: int, path: Path) -> Tensor:
    """The indices of the first samples of each label that occurs, in the order of the file."""
    counts = labels.bincount().tolist()
    for label, count in enumerate(counts):
        if 0 < count < number:
            found = f"expected at most {count}, the number of images with label {label} in {path}"
            raise ArgumentError("samples_per_class", f"{found}, got {number}")
    chosen = [(labels == label).nonzero().flatten()[:number] for label in range(len(counts))]
    return torch.cat(chosen).sort().values


def _find(root: Path, split: Split, kind: str) -> Path:
    candidates = [root / f"{prefix}-{kind}{packed}" for prefix in _PREFIXES[split] for packed in ("", ".gz")]
    found = first_file(candidates)
    if found is not None:
        return found
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; expected one with IDX files such as {candidates[0].name}")
    expected = " or ".join(path.name for path in candidates)
    raise DataError(f"{root}: the {split} split is not there; expected {expected}")


def _read(path: Path, dimensions: int) -> Tensor:
    """All of an IDX file of bytes as a uint8 tensor, if the file is exactly as long as its header says."""
    try:
        with open_regular(path) as file, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file as stream:
            shape = _read_header(stream, path, dimensions)
            size, longest = math.prod(shape), _longest(path)
            # Compared first, so that a wrong header cannot ask for more memory than the file can fill.
            data = stream.read(size + 1 if size <= longest else 1)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or f"the file is damaged or truncated: {error}"
        raise DataError(f"{path}: cannot be read ({why})") from error
    if len(data) != size:
        fewer = f"fewer, or packs them {_MAX_RATIO} times" if path.suffix == ".gz" else "fewer"
        held = "more" if len(data) > size else f"only {len(data)}" if size <= longest else fewer
        raise DataError(f"{path}: the header says {_by(shape)} = {size} bytes, but the file holds {held}")
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(shape)


def _longest(path: Path) -> int:
    """How many bytes a file of this length may hold."""
    size = path.stat().st_size
    return max(_FREE, _MAX_RATIO * size) if path.suffix == ".gz" else size


def _read_header(stream: BinaryIO | gzip.GzipFile, path: Path, dimensions: int) -> tuple[int, ...]:
    header = stream.read(4 + 4 * dimensions)
    magic = bytes((0, 0, _BYTES, dimensions))
    if header[:4] != magic:
        raise DataError(
            f"{path}: not an IDX file of bytes in {dimensions} dimensions: "
            f"starts with {header[:4].hex(' ') or 'nothing'}, expected {magic.hex(' ')}"
        )
    if len(header) < 4 + 4 * dimensions:
        raise DataError(f"{path}: the file ends within its header, after {len(header)} bytes")
    return struct.unpack(f">{dimensions}I", header[4:])


def _by(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


FASHION_CLASSES = [
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
]
_FASHION = Path(__file__).parent.parent / "embedded" / "fashion"


@register.dataset("fashion_small")
def fashion_small(split: Split) -> MemoryImages:
    """A class-balanced part of Fashion-MNIST: 6,000 gray 28×28 images to train on and 2,000 to test on."""
    return idx(_FASHION, split, FASHION_CLASSES)


@dataclass
class MemoryImages:
    """Images, uint8 [N, C, H, W], and further fields by name: numbers such as "label", [N], or arrays, [N, ...]."""

    images: Tensor
    fields: dict[str, Tensor]
    classes: list[str]
    channels: int = field(init=False)

    def __post_init__(self) -> None:
        self.channels = self.images.shape[1]

    def __len__(self) -> int:
        return len(self.images)

    def update_digest(self, digest: DataDigest) -> None:
        """Add all images and fields to a fingerprint."""
        for name, values in {"image": self.images, **self.fields}.items():
            digest.array(name, values.numpy())

    def read(self, index: int) -> Sample:
        """One sample: "image" as uint8 [H, W, C] and its fields."""
        sample: Sample = {"image": self.images[index].permute(1, 2, 0).numpy()}
        for name, values in self.fields.items():
            value = values[index]
            sample[name] = value.item() if value.ndim == 0 else value.numpy()
        return sample

    def gather(self, ids: Tensor) -> dict[str, Tensor]:
        """The samples `ids` (int64 [N]) together: "image" [N, C, H, W] and the fields, copied."""
        gathered = {name: values.index_select(0, ids) for name, values in self.fields.items()}
        return {"image": self.images.index_select(0, ids), **gathered}
