"""Reading packs: every damaged byte is noticed, nothing is copied, and even ones give whole batches."""

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
from paceline.data.pack import PackedSamples, packed, write_pack
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.geometric import RandomHorizontalFlip, RandomResizedCrop


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> PackedSamples:
    """Five samples, one of which could not be read."""
    path = tmp_path_factory.mktemp("packs") / "p"
    write_pack(Scenes(size=6, bad=frozenset({1})), path, None, max_skipped=1)
    return packed(path)


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> PackedSamples:
    path = tmp_path_factory.mktemp("even") / "p"
    write_pack(Scenes(size=3, even=True, with_objects=False), path, None)
    return packed(path)


def problems(content: bytes, path: Path) -> list[str]:
    path.write_bytes(content)
    found = []
    try:
        pack = packed(path)
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
    record = pack._record(sample).tobytes()
    return pack.file.read_bytes().index(record) + len(record) - 70


def test_a_damaged_sample_is_named_when_it_is_read(pack: PackedSamples, tmp_path: Path) -> None:
    damaged = bytearray(pack.file.read_bytes())
    damaged[place_of(pack, 3)] ^= 128
    (tmp_path / "p").write_bytes(damaged)
    opened = packed(tmp_path / "p")
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
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_of_an_even_pack_is_noticed(even: PackedSamples, place: float, bit: int) -> None:
    damaged = bytearray(even.file.read_bytes())
    damaged[int(place * len(damaged))] ^= 1 << bit
    assert problems(bytes(damaged), even.file.with_name("flipped"))


@settings(max_examples=100, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_noticed_at_once(pack: PackedSamples, share: float) -> None:
    path = pack.file.with_name("short")
    path.write_bytes(pack.file.read_bytes()[: int(share * pack.file.stat().st_size)])
    with pytest.raises(DataError, match="short: "):
        packed(path)


def test_what_is_no_pack_is_refused(tmp_path: Path) -> None:
    assert "not a pack" in problems(b"", tmp_path / "empty")[0]
    assert "not a pack, or damaged (is no file" in problems(b"\x89PNG" + bytes(100), tmp_path / "png")[0]
    with pytest.raises(DataError, match=r"not a pack, or damaged .*directory"):
        packed(tmp_path)


def test_another_version_is_named(pack: PackedSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.pack.PACK_VERSION", 9)
    assert "holds no pack of version 9" in problems(pack.file.read_bytes(), tmp_path / "later")[0]


def test_even_samples_come_as_whole_batches(tmp_path: Path) -> None:
    write_pack(Scenes(size=9, even=True, with_objects=False), tmp_path / "p", None)
    source = SplitLoader(packed(tmp_path / "p"), [RandomHorizontalFlip()], seed=0)
    assert source.in_memory
    ids = np.array([7, 0, 7, 3])
    batch = source.fetch(0, ids)
    assert batch.ids.tolist() == [7, 0, 7, 3]
    assert batch["image"].shape == (4, 3, 40, 60)
    assert batch["image"].is_contiguous()
    for place, index in enumerate(ids.tolist()):
        original = Scenes(even=True).read(index)
        np.testing.assert_array_equal(batch["image"][place].permute(1, 2, 0).numpy(), original["image"])
        np.testing.assert_array_equal(batch["mask"][place].numpy(), original["mask"])
        assert batch["label"][place] == original["label"]
        assert batch["weight"][place] == original["weight"]
        assert batch["size"][place].tolist() == [40, 60]
    assert (batch["label"].dtype, batch["weight"].dtype) == (torch.int64, torch.float64)


def test_damage_is_noticed_in_whole_batches_too(tmp_path: Path) -> None:
    write_pack(Scenes(size=9, even=True, with_objects=False), tmp_path / "p", None)
    content = bytearray((tmp_path / "p").read_bytes())
    content[place_of(packed(tmp_path / "p"), 0)] ^= 1
    (tmp_path / "p").write_bytes(content)
    source = SplitLoader(packed(tmp_path / "p"), [], seed=0)
    assert source.fetch(0, np.array([1, 8])).size == 2
    with pytest.raises(DataError, match="sample 0 is damaged"):
        source.fetch(0, np.array([1, 0]))


def test_samples_of_several_sizes_or_with_objects_are_taken_one_by_one(tmp_path: Path) -> None:
    write_pack(Scenes(with_objects=False), tmp_path / "sizes", None)
    write_pack(Scenes(even=True), tmp_path / "objects", None)
    assert not SplitLoader(packed(tmp_path / "sizes"), [], seed=0).in_memory
    source = SplitLoader(packed(tmp_path / "objects"), [], seed=0)
    assert not source.in_memory
    batch = source.fetch(0, np.array([0, 3]))
    assert [len(boxes) for boxes in batch["boxes"]] == [0, 3]


def test_transforms_run_on_packed_samples(tmp_path: Path) -> None:
    write_pack(Scenes(with_objects=False), tmp_path / "p", None)
    transforms = [RandomResizedCrop(16)]
    ours = SplitLoader(packed(tmp_path / "p"), transforms, seed=5).fetch(2, np.array([4, 1]))
    plain = SplitLoader(Scenes(with_objects=False), transforms, seed=5).fetch(2, np.array([4, 1]))
    for name in plain:
        assert torch.equal(ours[name], plain[name]), name
