"""Fingerprints of data sets: whether a run that continues still sees the data that it began with.

A fingerprint holds the class names, the number of samples, and a digest of the files in their order: the name and size
of each image, and the content of lists and annotations. It depends neither on where the data lies, nor on times of
change, which copies do not keep, nor on processes, loaders and caches. Sizes are those of the moment it is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import DataError
from paceline.core.regular_file import open_regular
from paceline.core.text import join_first, pluralize
from paceline.data.batch import KeypointNames
from paceline.data.split_loader import Dataset

_MAX_GROUPS = 1000  # folders that messages name; the digest covers all
_OTHERS = "(further folders)"
_MAX_NAMES = 5  # names in a sentence
_BLOCK = 1 << 20


class FileGroup(NamedTuple):
    """The files of one folder, or one file that is covered by its content."""

    files: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class DataFingerprint:
    """What identifies the data of one split. `digest` is empty for data sets that have no `update_digest`."""

    classes: list[str]
    num_samples: int
    digest: str = ""
    groups: dict[str, FileGroup] = field(default_factory=dict)
    channels: int = 3
    """Of the images; only kept, so that a model can be built without the data."""
    joints: KeypointNames | None = None
    """The names of keypoints, kept likewise."""
    category_ids: list[int] | None = None
    """What the data set's files call the classes, kept likewise: predictions are written with these ids."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain lists, dicts, numbers and strings; names that are not UTF-8 hold lone surrogates."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DataFingerprint:
        """What `to_json` gave, also after JSON has made lists of its tuples."""
        groups = {name: FileGroup(*group) for name, group in content["groups"].items()}
        classes, channels = list(content["classes"]), int(content.get("channels", 3))
        joints = content.get("joints") and KeypointNames.from_json(content["joints"])
        ids = content.get("category_ids")
        return cls(classes, int(content["num_samples"]), str(content["digest"]), groups, channels, joints, ids)


class DataDigest:
    """Takes what a data set consists of, in order, and condenses it; `with_sizes` asks the disk about each file."""

    def __init__(self, with_sizes: bool = True) -> None:
        self._with_sizes = with_sizes
        self._all = _hash()
        self._groups: dict[str, _GrowingGroup] = {}

    def files(self, folder: Path, names: Iterable[bytes], called: str = "files", by_content: bool = False) -> None:
        """Add files by name and size, or all that they hold if they are small, `by_content`.

        Names are relative to `folder`; what lies in it directly, and not in a folder below, is reported as `called`.
        """
        base = os.fsencode(folder) + b"/"
        for name in names:
            parent, _, own = name.rpartition(b"/")
            path = name if name.startswith(b"/") else base + name
            size, content = 0, b""
            if self._with_sizes:
                size, content = _content(path) if by_content else (_size(path), b"")
            self._all.update(b"%d %d %b%b" % (size, len(name), name, content))
            self._add(os.fsdecode(parent) or called, size, b"%d %d %b%b" % (size, len(own), own, content))

    def content(self, path: Path) -> None:
        """Add all that one file holds, such as a list or annotations."""
        try:
            with open_regular(path) as file:
                self._add_blocks(path.name, iter(lambda: file.read(_BLOCK), b""))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error

    def array(self, called: str, values: np.ndarray[Any, Any]) -> None:
        """Add an array by its type, shape and content."""
        described = f"{values.dtype.str} {values.shape}".encode()
        self._add_blocks(called, (described, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))

    def _add_blocks(self, called: str, blocks: Iterable[bytes | memoryview]) -> None:
        own, size = _hash(), 0
        for block in blocks:
            own.update(block)
            size += len(block)
        self._all.update(own.digest())
        self._add(called, size, own.digest())

    def _add(self, name: str, size: int, entry: bytes) -> None:
        if name not in self._groups and len(self._groups) >= _MAX_GROUPS:
            name = _OTHERS
        group = self._groups.setdefault(name, _GrowingGroup())
        group.files += 1
        group.bytes += max(size, 0)
        group.digest.update(entry)

    def finish(self) -> tuple[str, dict[str, FileGroup]]:
        """The digest of everything, and of each group."""
        groups = self._groups.items()
        return self._all.hexdigest(), {
            name: FileGroup(each.files, each.bytes, each.digest.hexdigest()) for name, each in groups
        }


def _hash() -> Any:
    return blake2b(digest_size=16)


@dataclass
class _GrowingGroup:
    files: int = 0
    bytes: int = 0
    digest: Any = field(default_factory=_hash)


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - of many, so without a Path for each
    except (OSError, ValueError):
        return -1  # missing, or no name of a file at all


def _content(path: bytes) -> tuple[int, bytes]:
    try:
        with open_regular(path, buffering=0) as file:
            content = file.read()
    except (OSError, ValueError):
        return -1, b""
    return len(content), blake2b(content, digest_size=16).digest()


def fingerprint(dataset: Dataset, with_sizes: bool = True) -> DataFingerprint:
    """The fingerprint of a data set as its files are now; without their sizes, as its index is.

    A data set adds its files in `update_digest(digest)`, in the order of its samples; without that method, one of a
    user's say, only class names and the number of samples are known.
    """
    classes = [str(name) for name in getattr(dataset, "classes", None) or []]
    channels = int(getattr(dataset, "channels", 3))
    joints: KeypointNames | None = getattr(dataset, "joints", None)
    ids = [int(each) for each in getattr(dataset, "category_ids", None) or []] or None
    update: Callable[[DataDigest], None] | None = getattr(dataset, "update_digest", None)
    if update is None:
        return DataFingerprint(classes, len(dataset), channels=channels, joints=joints, category_ids=ids)
    digest = DataDigest(with_sizes)
    update(digest)
    return DataFingerprint(classes, len(dataset), *digest.finish(), channels, joints, ids)


def differences(old: Mapping[str, DataFingerprint], new: Mapping[str, DataFingerprint]) -> list[str]:
    """A sentence for each thing that differs, split by split, such as "train: 7 classes became 8: new `dog`".

    Empty if a run may continue. Splits that only one of the two has are differences as well.
    """
    found = []
    for split in dict.fromkeys([*old, *new]):
        if split not in old or split not in new:
            found.append(f"{split}: the split was {'added' if split in new else 'removed'}")
        else:
            found += [f"{split}: {sentence}" for sentence in _differences(old[split], new[split])]
    return found


def _differences(old: DataFingerprint, new: DataFingerprint) -> list[str]:
    found = []
    if old.classes != new.classes:
        changes = [("new", _only_in(new.classes, old.classes)), ("gone", _only_in(old.classes, new.classes))]
        named = "; ".join(f"{what} {join_first(names, _MAX_NAMES)}" for what, names in changes if names)
        is_same_number = len(old.classes) == len(new.classes)
        number = (
            "other classes" if is_same_number else f"{pluralize(len(old.classes), 'class')} became {len(new.classes)}"
        )
        found.append(f"{number}: {named or 'they come in another order'}")
    if old.num_samples != new.num_samples:
        found.append(f"{pluralize(old.num_samples, 'sample')} became {new.num_samples:,}")
    if old.digest and new.digest:  # else one of them is of a data set that tells nothing of its files
        groups = [_group_difference(name, old.groups.get(name), new.groups.get(name)) for name in old.groups]
        groups += [_group_difference(name, None, new.groups[name]) for name in new.groups if name not in old.groups]
        sentences = [sentence for sentence in groups if sentence]
        more = len(sentences) - _MAX_NAMES
        found += [*sentences[:_MAX_NAMES], f"{more:,} more folders differ"] if more > 0 else sentences
        if not found and old.digest != new.digest:
            found.append("the files come in another order")
    return found


def _only_in(names: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [f"`{name}`" for name in names if name not in known]


def _group_difference(name: str, old: FileGroup | None, new: FileGroup | None) -> str:
    """What became of a folder, or of a file that is covered by its content; empty if nothing."""
    if old == new:
        return ""
    if old is None or new is None:
        there = new or old
        assert there is not None
        return f"`{name}` is {'gone' if new is None else 'new'} ({pluralize(there.files, 'file')})"
    sizes = f"{old.bytes:,} bytes became {new.bytes:,}"
    if old.files != new.files:
        return f"`{name}`: {pluralize(old.files, 'file')} became {new.files:,} ({sizes})"
    if old.files == 1:
        return f"`{name}` has other content" + (f" ({sizes})" if old.bytes != new.bytes else "")
    changed = "sizes of files changed" if old.bytes != new.bytes else "names, order or sizes of files changed"
    return f"`{name}`: {changed} ({pluralize(old.files, 'file')}; {sizes})"
