"""Pipes, devices, folders and links in the place of files: refused by name, never waited for, never followed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import DataError
from paceline.data.datasets.coco import Coco
from paceline.data.datasets.idx import idx
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.datasets.image_mask import ImageMask
from paceline.data.datasets.keypoints import Keypoints
from paceline.data.datasets.list_file import ListFile
from paceline.data.datasets.video import VideoFolder
from paceline.data.datasets.voc import Voc
from paceline.data.fingerprint import fingerprint
from paceline.data.loader_profile import loading_speed
from paceline.data.mapped_arrays import ArrayWriter
from paceline.data.pack import PackedSamples
from paceline.data.split_loader import SplitLoader
from paceline.data.transforms.geometric import Resize


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """What waits for a pipe would wait forever."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("waited for a pipe")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    names = ["images/0.png", "images/1.png", "masks/0.png", "masks/1.png", "JPEGImages/0.png", "a/b/0.png", "c/d/0.mp4"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), 255).save(tmp_path / name, "png")
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations/0.xml").write_text("<annotation/>")
    np.save(tmp_path / "joints.npy", np.ones((2, 14, 2)))
    (tmp_path / "train-labels-idx1-ubyte").touch()
    return tmp_path


def first(dataset: Any) -> None:
    dataset.read(0)


CASES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "coco": ("all.json", lambda root: Coco(root, "all.json")),
    "joints": ("joints.npy", Keypoints),
    "joints_json": ("j.json", lambda root: Keypoints(root, "j.json")),
    "joints_split": ("train.txt", lambda root: Keypoints(root, split="train")),
    "pack": ("a.pack", lambda root: PackedSamples(root / "a.pack")),
    "list_csv": ("a.csv", lambda root: ListFile(root / "a.csv")),
    "list_json": ("a.json", lambda root: ListFile(root / "a.json")),
    "mask_list": ("a.txt", lambda root: ImageMask(root, list_file="a.txt", binary=True)),
    "voc_split": ("train.txt", lambda root: Voc(root, "train", classes=["cat"])),
    "voc_xml": ("Annotations/0.xml", lambda root: Voc(root, classes=["cat"])),
    "voc_image": ("JPEGImages/0.png", lambda root: first(Voc(root, classes=["cat"]))),
    "idx": ("train-images-idx3-ubyte", lambda root: idx(root, "train")),
    "idx_gz": ("train-images-idx3-ubyte.gz", lambda root: idx(root, "train")),
    "image": ("a/b/0.png", lambda root: first(ImageFolder(root / "a"))),
    "mask": ("masks/0.png", lambda root: first(ImageMask(root, binary=True))),
    "video": ("c/d/0.mp4", lambda root: VideoFolder(root / "c").read(0)["image"].num_frames),
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/null")  # it has an end, unlike others


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("put", [pipe, device, folder])
@pytest.mark.parametrize("case", CASES)
def test_other_things_than_files_are_refused_by_name(case: str, put: Callable[[Path], None], root: Path) -> None:
    name, use = CASES[case]
    if put is folder and case in ("image", "mask", "video"):
        return  # there they are looked into
    (root / name).unlink(missing_ok=True)
    put(root / name)
    with pytest.raises(DataError) as caught:
        use(root)
    text = str(caught.value)
    assert Path(name).name in text
    assert f"a {'directory' if put is folder else put.__name__}, not a file" in text or "leads out of" in text


def test_speed_is_measured_without_waiting(root: Path) -> None:
    """Of a data set some of whose files are none."""
    (root / "images/0.png").unlink()
    pipe(root / "images/0.png")
    source = SplitLoader(ImageMask(root, binary=True), [Resize([2, 2])], 0)
    with pytest.raises(DataError, match=r"0\.png: cannot be read \(a pipe, not a file\)"):
        loading_speed(source, [0, 1], 1)


def test_a_fingerprint_waits_for_nothing(root: Path) -> None:
    dataset = Voc(root, classes=["cat"])
    before = fingerprint(dataset)
    (root / "Annotations/0.xml").unlink()
    pipe(root / "Annotations/0.xml")
    assert fingerprint(dataset) != before


# --- indexes that somebody else wrote -----------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("photos/cat/0.png", "secret.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), 7 if name == "secret.png" else 255).save(tmp_path / name)
    return tmp_path / "photos"


def write_index(path: Path, name: str) -> None:
    """One that is always true, since nothing is watched, and names a file elsewhere."""
    path.parent.mkdir(exist_ok=True)
    writer = ArrayWriter()
    writer.append_texts("file", [name.encode()])
    writer.append("label", np.zeros(1, np.int64))
    writer.append_texts("watched", [])
    writer.append("watched.state", np.empty((0, 3), np.int64))
    writer.facts = {"name": path.name, "began": 1, "classes": ["cat"], "notes": []}
    with path.open("w+b") as file:
        writer.write(file)


def test_an_index_that_came_with_the_data_is_not_even_looked_at(photos: Path, own_cache: Path) -> None:
    ImageFolder(photos)
    (kept,) = own_cache.iterdir()
    kept.unlink()
    shipped = photos / ".paceline" / kept.name.rpartition("-")[0]
    write_index(shipped, "cat/../../secret.png")
    before = shipped.read_bytes()
    dataset = ImageFolder(photos)
    assert dataset.path(0) == photos / "cat/0.png"
    assert int(dataset.read(0)["image"].max()) == 255
    assert (list(shipped.parent.iterdir()), shipped.read_bytes()) == ([shipped], before)


@pytest.mark.parametrize(
    "name", ["cat/../../secret.png", "../secret.png", "/etc/hostname", "cat/link.png", "out/x.png"]
)
def test_no_index_leads_out_of_the_root(name: str, photos: Path, own_cache: Path) -> None:
    """Not even one that lies where ours do."""
    ImageFolder(photos)
    (kept,) = own_cache.iterdir()
    (photos / "cat/link.png").symlink_to("../../secret.png")
    (photos.parent / "x.png").write_bytes((photos.parent / "secret.png").read_bytes())
    (photos / "out").symlink_to("..")
    write_index(kept, name)
    dataset = ImageFolder(photos)
    assert dataset.path(0) == photos / name
    for read in (dataset.read, dataset.open):
        with pytest.raises(DataError, match="leads out of"):
            read(0)
