"""Reading packs: every damaged byte is noticed, and nothing is copied."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packable import Scenes

from paceline.core.errors import DataError
from paceline.data.pack import PackedSamples, write_pack
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.geometric import RandomResizedCrop


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> PackedSamples:
    """Five samples, one of which could not be read."""
    path = tmp_path_factory.mktemp("packs") / "p"
    write_pack(Scenes(size=6, bad=frozenset({1})), path, None, max_skipped=1)
    return PackedSamples(path)


def problems(content: bytes, path: Path) -> list[str]:
    path.write_bytes(content)
    found = []
    try:
        pack = PackedSamples(path)
        for index in range(len(pack)):
            try:
                pack.read(index)
            except DataError as error:
                found.append(str(error))
    except DataError as error:
        found.append(str(error))
    return found


def test_nothing_is_copied(pack: PackedSamples) -> None:
    for name in ("image", "mask"):
        array: Any = pack.read(2)[name]
        assert not array.flags.owndata
        assert not array.flags.writeable
    again: Any = pack.read(2)["image"]
    assert again.ctypes.data == pack.read(2)["image"].ctypes.data
    assert pack.read(2)["boxes"].flags.writeable


def test_a_worker_opens_the_file_itself(pack: PackedSamples) -> None:
    sent = pickle.dumps(pack)
    assert len(sent) < 500
    np.testing.assert_array_equal(pickle.loads(sent).read(3)["image"], pack.read(3)["image"])
    assert pack.path(3) == pack.file


def place_of(pack: PackedSamples, sample: int) -> int:
    """Where in the file the image of a sample is."""
    return int(pack._ends[sample]) - 70


def test_a_damaged_sample_is_named_when_it_is_read(pack: PackedSamples, tmp_path: Path) -> None:
    damaged = bytearray(pack.file.read_bytes())
    damaged[place_of(pack, 3)] ^= 128
    (tmp_path / "p").write_bytes(damaged)
    opened = PackedSamples(tmp_path / "p")
    assert opened.read(2)["label"] == 1
    for _ in range(2):
        with pytest.raises(DataError, match=r"p: sample 3 is damaged \(its checksum is wrong\); write it again"):
            opened.read(3)
    assert len(problems(bytes(damaged), tmp_path / "p")) == 1


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(pack: PackedSamples, place: float, bit: int) -> None:
    damaged = bytearray(pack.file.read_bytes())
    damaged[int(place * len(damaged))] ^= 1 << bit
    assert problems(bytes(damaged), pack.file.with_name("flipped"))


@settings(max_examples=100, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_noticed_at_once(pack: PackedSamples, share: float) -> None:
    path = pack.file.with_name("short")
    path.write_bytes(pack.file.read_bytes()[: int(share * pack.file.stat().st_size)])
    with pytest.raises(DataError, match="short: "):
        PackedSamples(path)


def test_what_is_no_pack_is_refused(tmp_path: Path) -> None:
    assert "not a pack" in problems(b"", tmp_path / "empty")[0]
    assert "not a pack, or damaged (is no file" in problems(b"\x89PNG" + bytes(100), tmp_path / "png")[0]
    with pytest.raises(DataError, match=r"not a pack, or damaged .*directory"):
        PackedSamples(tmp_path)


def test_another_version_is_named(pack: PackedSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.pack.PACK_VERSION", 9)
    assert "holds no pack of version 9" in problems(pack.file.read_bytes(), tmp_path / "later")[0]


def test_transforms_run_on_packed_samples(tmp_path: Path) -> None:
    write_pack(Scenes(with_objects=False), tmp_path / "p", None)
    transforms = [RandomResizedCrop(16)]
    ours = SplitLoader(PackedSamples(tmp_path / "p"), transforms, seed=5).fetch(2, np.array([4, 1]))
    plain = SplitLoader(Scenes(with_objects=False), transforms, seed=5).fetch(2, np.array([4, 1]))
    for name in plain:
        assert torch.equal(ours[name], plain[name]), name
