"""Packs: everything comes back, damage is named, and a pack is there whole or not at all."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from packable import Scenes
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.pack import PackedSamples, write_pack


def same(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def test_every_field_comes_back_as_it_was(tmp_path: Path) -> None:
    written = write_pack(Scenes(), tmp_path / "a.pack", size=None)
    assert (written.samples, written.skipped) == (5, [])
    assert written.bytes == (tmp_path / "a.pack").stat().st_size
    pack = PackedSamples(tmp_path / "a.pack")
    assert len(pack) == 5
    assert (pack.classes, pack.channels) == (["ground", "Käfer"], 3)
    assert pack.joints == Scenes().joints
    for index in range(5):
        original, found = Scenes().read(index), pack.read(index)
        assert original.keys() == found.keys()
        for name, value in original.items():
            same(found[name], value)


def test_halving_scales_everything(tmp_path: Path) -> None:
    write_pack(Scenes(even=True), tmp_path / "half.pack", size=20)
    original, found = Scenes(even=True).read(3), PackedSamples(tmp_path / "half.pack").read(3)
    pillow = Image.fromarray(original["image"]).resize((30, 20), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(found["image"].astype(int), np.asarray(pillow), atol=2)
    np.testing.assert_array_equal(found["mask"], original["mask"][::2, ::2])
    np.testing.assert_array_equal(found["masks"], original["masks"][:, ::2, ::2])
    np.testing.assert_allclose(found["boxes"], original["boxes"] / 2)
    np.testing.assert_allclose(found["keypoints"], original["keypoints"] / [2, 2, 1])
    np.testing.assert_allclose(found["area"], 24)
    np.testing.assert_array_equal(found["size"], [40, 60])
    assert (found["label"], found["image_id"], found["weight"]) == (1, 1003, 1.0)


def test_sizes(tmp_path: Path) -> None:
    assert shapes(tmp_path, 44) == [(40, 60, 3), (44, 62, 3), (44, 58, 3), (44, 55, 3), (44, 53, 3)]
    assert shapes(tmp_path, [30, 50]) == [(30, 50, 3)] * 5


def shapes(folder: Path, size: int | list[int]) -> list[tuple[int, ...]]:
    write_pack(Scenes(), folder / "sized.pack", size)
    pack = PackedSamples(folder / "sized.pack")
    assert pack.facts["size"] == size
    return [pack.read(index)["image"].shape for index in range(len(pack))]


def test_the_number_of_threads_does_not_show(tmp_path: Path) -> None:
    dataset = Scenes(size=30, bad=frozenset({4, 17}))
    done: list[tuple[int, int]] = []
    write_pack(dataset, tmp_path / "one", 20, lambda *each: done.append(each), max_skipped=2, threads=1)
    write_pack(dataset, tmp_path / "four", 20, max_skipped=2, threads=4)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "four").read_bytes()
    assert done == [(number, 30) for number in range(1, 31)]


def test_what_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    written = write_pack(Scenes(bad=frozenset({0, 2})), tmp_path / "p", None, max_skipped=2)
    assert [each.sample for each in written.skipped] == [0, 2]
    pack = PackedSamples(tmp_path / "p")
    assert [pack.read(index)["image_id"] for index in range(len(pack))] == [1001, 1003, 1004]
    assert pack.skipped == written.skipped
    assert pack.notes[1] == (
        "left out when the pack was written: sample 2 (scenes/2.jpg): damaged or truncated image (it is bad)"
    )
    with pytest.raises(DataError, match=r"2 samples cannot be read and 1 may be left out.*sample 2 \(scenes/2.jpg\)"):
        write_pack(Scenes(bad=frozenset({0, 2})), tmp_path / "q", None, max_skipped=1)
    with pytest.raises(DataError, match=r"no sample that could be packed.*sample 0 \(scenes/0.jpg\)"):
        write_pack(Scenes(size=1, bad=frozenset({0})), tmp_path / "q", None, max_skipped=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["p"]


def test_samples_hold_numbers(tmp_path: Path) -> None:
    class Named(Scenes):
        def read(self, index: int) -> dict[str, object]:
            return {**super().read(index), "name": "beetle"}

    with pytest.raises(DataError, match="'name' of sample 0 is 'beetle'"):
        write_pack(Named(), tmp_path / "p", None)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    write_pack(Scenes(), tmp_path / "p", None)
    before = (tmp_path / "p").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(DataError, match=r"the pack cannot be written \(File too large\)"):
            write_pack(Scenes(size=50), tmp_path / "p", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.name for each in tmp_path.iterdir()] == ["p"]
    assert (tmp_path / "p").read_bytes() == before


WRITE_SLOWLY = """
import sys
from pathlib import Path
from paceline.data.pack import write_pack
from packable import Scenes

write_pack(Scenes(size=1000, pause=0.01), Path(sys.argv[1]), None, lambda done, of: print(done, flush=True))
"""


def test_a_killed_writer_leaves_no_pack(tmp_path: Path) -> None:
    path = tmp_path / "p"
    command = [sys.executable, "-c", WRITE_SLOWLY, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == 20:
                with pytest.raises(DataError, match="another process is writing this pack just now"):
                    write_pack(Scenes(), path, None)
                writer.kill()
        assert writer.wait(30) == -signal.SIGKILL
    assert not path.exists()
    with pytest.raises(DataError, match="no such file; make it with `paceline data RECIPE --pack"):
        PackedSamples(path)
    write_pack(Scenes(), path, None)
    assert [each.name for each in tmp_path.iterdir()] == ["p"]
    assert [PackedSamples(path).read(index)["image_id"] for index in range(5)] == [1000, 1001, 1002, 1003, 1004]


def test_large_images_are_packed_as_they_would_be_resized(tmp_path: Path) -> None:
    """A cut out of a packed image is a view, and OpenCV takes it."""
    write_pack(Scenes(), tmp_path / "p", None)
    image = PackedSamples(tmp_path / "p").read(2)["image"]
    part = image[3:30, 5:40]
    assert not image.flags.writeable
    assert not part.flags.owndata
    np.testing.assert_array_equal(cv2.resize(part, (20, 20)), cv2.resize(part.copy(), (20, 20)))
