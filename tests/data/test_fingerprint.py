import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data.datasets.coco import Coco
from paceline.data.datasets.idx import fashion_small
from paceline.data.datasets.image_folder import ImageFolder
from paceline.data.datasets.image_mask import ImageMask
from paceline.data.datasets.keypoints import Keypoints
from paceline.data.datasets.list_file import ListFile
from paceline.data.datasets.video import VideoFolder
from paceline.data.datasets.voc import Voc
from paceline.data.fingerprint import DataDigest, DataFingerprint, differences, fingerprint
from paceline.data.pack import PackedSamples, write_pack


def paint(path: Path, value: int, size: tuple[int, int] = (8, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def folder(root: Path) -> Path:
    for number in range(9):
        paint(root / "abc"[number // 3] / f"{number}.bmp", number)
    return root


def flat(root: Path) -> Path:
    for number in range(4):
        paint(root / "images" / f"{number}.bmp", number)
        paint(root / "masks" / f"{number}.png", number % 2)
    return root


def make_list(root: Path) -> Path:
    flat(root)
    (root / "list.csv").write_text("".join(f"images/{number}.bmp,{'xy'[number % 2]}\n" for number in range(4)))
    return root


def coco(root: Path) -> Path:
    flat(root)
    images = [{"id": n, "file_name": f"{n}.bmp", "width": 8, "height": 6} for n in range(4)]
    boxes = [{"id": n + 1, "image_id": n, "category_id": 1, "bbox": [1, 1, 4, 3]} for n in range(4)]
    content = {"categories": [{"id": 1, "name": "cat"}], "images": images, "annotations": boxes}
    (root / "all.json").write_text(json.dumps(content))
    return root


def voc(root: Path) -> Path:
    (root / "Annotations").mkdir(parents=True)
    for number in range(3):
        paint(root / "JPEGImages" / f"{number}.bmp", number)
        box = "<xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>3</ymax>"
        content = f"<annotation><object><name>cat</name><bndbox>{box}</bndbox></object></annotation>"
        (root / f"Annotations/{number}.xml").write_text(content)
    return root


def joints(root: Path) -> Path:
    flat(root)
    np.save(root / "joints.npy", np.arange(4 * 14 * 2, dtype=np.float32).reshape(4, 14, 2) / 20)
    return root


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Another content of the same length."""
    assert len(old) == len(new)

    def change(root: Path) -> None:
        data = (root / name).read_bytes()
        (root / name).write_bytes(data.replace(old.encode(), new.encode(), 1))

    return change


def enlarge(name: str) -> Callable[[Path], None]:
    return lambda root: paint(root / name, 1, (90, 60))


def move_joint(root: Path) -> None:
    found = np.load(root / "joints.npy")
    np.save(root / "joints.npy", found + 1)


CASES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], Callable[[Path], None]]] = {
    "image_folder": (folder, ImageFolder, enlarge("b/3.bmp")),
    "video_folder": (folder, lambda root: VideoFolder(root, extensions=[".bmp"]), enlarge("b/3.bmp")),
    "list_file": (make_list, lambda root: ListFile(root / "list.csv"), edit("list.csv", "x", "y")),
    "list_file_image": (make_list, lambda root: ListFile(root / "list.csv"), enlarge("images/2.bmp")),
    "image_mask": (flat, lambda root: ImageMask(root, binary=True), enlarge("masks/1.png")),
    "coco": (coco, lambda root: Coco(root, "all.json"), edit("all.json", "[1, 1, 4, 3]", "[1, 1, 3, 4]")),
    "coco_image": (coco, lambda root: Coco(root, "all.json"), enlarge("images/1.bmp")),
    "voc": (voc, Voc, edit("Annotations/1.xml", "<xmax>4", "<xmax>5")),
    "voc_image": (voc, Voc, enlarge("JPEGImages/1.bmp")),
    "joints": (joints, Keypoints, move_joint),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_elsewhere_and_other_data_differs(name: str, tmp_path: Path) -> None:
    make, load, change = CASES[name]
    root = make(tmp_path / "one")
    first = fingerprint(load(root))
    assert first.digest
    assert fingerprint(load(root)) == first, "also with an index that is kept"
    moved = Path(shutil.copytree(root, tmp_path / "elsewhere/two"))
    for path in moved.rglob("*"):
        os.utime(path)
    assert differences({"train": first}, {"train": fingerprint(load(moved))}) == []
    change(moved)
    second = fingerprint(load(moved))
    assert second.digest != first.digest
    assert len(differences({"train": first}, {"train": second})) == 1


def test_a_fingerprint_passes_through_json(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "b").rename(root / os.fsdecode(b"b\xff"))
    first = fingerprint(ImageFolder(root))
    again = DataFingerprint.from_json(json.loads(json.dumps(first.to_json())))
    assert again == first
    assert differences({"val": first}, {"val": again}) == []


def compared(root: Path, change: Callable[[], Any]) -> list[str]:
    before = {"train": fingerprint(ImageFolder(root))}
    change()
    return differences(before, {"train": fingerprint(ImageFolder(root))})


def test_sizes_are_those_of_now_though_the_index_is_kept(tmp_path: Path) -> None:
    root = folder(tmp_path)
    path = root / "a/1.bmp"
    status = path.parent.stat()

    def grow() -> None:
        path.write_bytes(path.read_bytes() + b"x")  # the folder, which the index watches, stays as it is
        assert path.parent.stat().st_mtime_ns == status.st_mtime_ns

    (sentence,) = compared(root, grow)
    assert sentence.startswith("train: `a`")
    assert "3 files" in sentence


def test_removed_files_are_counted_where_they_were(tmp_path: Path) -> None:
    samples, files = compared(folder(tmp_path), (tmp_path / "b/4.bmp").unlink)
    assert samples == "train: 9 samples became 8"
    assert files.startswith("train: `b`: 3 files became 2")


def test_a_renamed_class_is_named(tmp_path: Path) -> None:
    found = compared(folder(tmp_path), lambda: (tmp_path / "b").rename(tmp_path / "d"))
    assert found[0] == "train: other classes: new `d`; gone `b`"
    assert found[1:] == ["train: `b` is gone (3 files)", "train: `d` is new (3 files)"]


def test_a_further_class_is_named(tmp_path: Path) -> None:
    found = compared(folder(tmp_path), lambda: paint(tmp_path / "d/9.bmp", 9))
    assert found[0] == "train: 3 classes became 4: new `d`"
    assert found[1:] == ["train: 9 samples became 10", "train: `d` is new (1 file)"]


def test_a_renamed_file_is_noticed(tmp_path: Path) -> None:
    (sentence,) = compared(folder(tmp_path), lambda: (tmp_path / "c/7.bmp").rename(tmp_path / "c/77.bmp"))
    assert sentence.startswith("train: `c`: ")


def test_another_order_of_a_list_is_noticed(tmp_path: Path) -> None:
    root = make_list(tmp_path)
    before = fingerprint(ListFile(root / "list.csv"))
    lines = (root / "list.csv").read_text().splitlines()
    (root / "list.csv").write_text("\n".join(reversed(lines)) + "\n")
    assert fingerprint(ListFile(root / "list.csv")).digest != before.digest


def test_parts_of_one_list_differ(tmp_path: Path) -> None:
    root = make_list(tmp_path)
    shares = {"train": 0.5, "val": 0.5}
    train, val = (fingerprint(ListFile(root / "list.csv", split=each, split_shares=shares)) for each in shares)
    assert (train.num_samples, val.num_samples) == (2, 2)
    assert train.digest != val.digest


def test_splits_that_come_and_go_are_named(tmp_path: Path) -> None:
    one = fingerprint(ImageFolder(folder(tmp_path)))
    found = differences({"train": one, "val": one}, {"train": one, "test": one})
    assert [sentence.split(":")[0] for sentence in found] == ["val", "test"]


def test_images_in_memory_and_packs_are_known_by_content(tmp_path: Path) -> None:
    small = fashion_small("test")
    before = fingerprint(small)
    assert (before.num_samples, before.classes) == (2000, small.classes)
    assert before == fingerprint(fashion_small("test"))
    small.fields["label"][7] += 1
    assert differences({"val": before}, {"val": fingerprint(small)}) == ["val: `label` has other content"]
    for name in ("one", "two"):
        write_pack(ImageFolder(folder(tmp_path / name)), tmp_path / f"{name}.pack", None)
    assert fingerprint(PackedSamples(tmp_path / "one.pack")) == fingerprint(PackedSamples(tmp_path / "two.pack"))
    paint(tmp_path / "one/a/1.bmp", 99)
    write_pack(ImageFolder(tmp_path / "one"), tmp_path / "one.pack", None)
    assert fingerprint(PackedSamples(tmp_path / "one.pack")) != fingerprint(PackedSamples(tmp_path / "two.pack"))


def test_a_data_set_of_a_user_is_known_by_classes_and_samples() -> None:
    class Plain(list[int]):
        classes = ("a", "b")

    first, more = fingerprint(Plain([1, 2])), fingerprint(Plain([1, 2, 3]))  # type: ignore[arg-type]
    assert first == DataFingerprint(["a", "b"], 2)
    assert differences({"train": first}, {"train": more}) == ["train: 2 samples became 3"]


class Many(list[bytes]):
    def update_digest(self, digest: DataDigest) -> None:
        digest.files(Path("nowhere"), self)


def test_many_folders_do_not_make_it_long() -> None:
    names = Many(b"%d/x.jpg" % number for number in range(3000))
    first = fingerprint(names)  # type: ignore[arg-type]
    assert len(first.groups) == 1001
    names[2900] = b"2900/y.jpg"
    assert len(differences({"train": first}, {"train": fingerprint(names)})) == 1  # type: ignore[arg-type]
