import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import ArgumentError, DataError
from paceline.data.datasets.idx import FASHION_CLASSES, MemoryImages, fashion_small, idx
from paceline.data.datasets.image_folder import ImageFolder

IMAGES = np.arange(3 * 2 * 4, dtype=np.uint8).reshape(3, 2, 4)
LABELS = np.array([2, 0, 9], np.uint8)


# --- in memory ----------------------------------------------------------------------------------------------


def test_memory_images_give_samples_and_batches() -> None:
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    boxes = torch.arange(8.0).view(2, 4)
    dataset = MemoryImages(images, {"label": torch.tensor([1, 0]), "box": boxes}, ["a", "b"])
    assert (len(dataset), dataset.channels, dataset.classes) == (2, 3, ["a", "b"])

    sample = dataset.read(1)
    assert sample["image"].shape == (4, 5, 3)
    assert np.array_equal(sample["image"][:, :, 2], images[1, 2].numpy())
    assert sample["label"] == 0
    assert type(sample["label"]) is int
    assert sample["box"].tolist() == [4, 5, 6, 7]

    gathered = dataset.gather(torch.tensor([1, 0, 1]))
    assert list(gathered) == ["image", "label", "box"]
    assert torch.equal(gathered["image"], images[[1, 0, 1]])
    assert gathered["label"].tolist() == [0, 1, 0]
    gathered["image"].zero_()
    assert dataset.images.any()


# --- IDX ----------------------------------------------------------------------------------------------------


def packed(values: NDArray[np.uint8]) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_split(folder: Path, prefix: str = "train", extension: str = "") -> None:
    write(folder, f"{prefix}-images-idx3-ubyte{extension}", packed(IMAGES))
    write(folder, f"{prefix}-labels-idx1-ubyte{extension}", packed(LABELS))


@pytest.mark.parametrize("extension", ["", ".gz"])
@pytest.mark.parametrize(("prefix", "split"), [("train", "train"), ("t10k", "test"), ("test", "test")])
def test_idx_reads_both_splits_packed_or_not(tmp_path: Path, prefix: str, split: str, extension: str) -> None:
    write_split(tmp_path, prefix, extension)
    dataset = idx(tmp_path, "train" if split == "train" else "test")
    assert np.array_equal(dataset.images.numpy(), IMAGES[:, None])
    assert dataset.images.dtype == torch.uint8
    assert dataset.fields["label"].tolist() == [2, 0, 9]
    assert dataset.fields["label"].dtype == torch.int64
    assert dataset.classes == list("0123456789")
    assert dataset.channels == 1
    assert dataset.read(2)["image"].shape == (2, 4, 1)


def test_idx_takes_class_names(tmp_path: Path) -> None:
    write_split(tmp_path)
    names = [f"class {k}" for k in range(12)]
    assert idx(tmp_path, "train", names).classes == names


def test_idx_keeps_the_first_samples_of_each_class(tmp_path: Path) -> None:
    images = np.arange(7, dtype=np.uint8)[:, None, None]
    write(tmp_path, "train-images-idx3-ubyte", packed(images))
    write(tmp_path, "train-labels-idx1-ubyte", packed(np.array([4, 1, 4, 4, 1, 1, 4], np.uint8)))
    dataset = idx(tmp_path, "train", samples_per_class=2)
    assert dataset.images.flatten().tolist() == [0, 1, 2, 4]
    assert dataset.fields["label"].tolist() == [4, 1, 4, 1]
    assert len(dataset.classes) == 10
    assert len(idx(tmp_path, "train", samples_per_class=3)) == 6
    with pytest.raises(ArgumentError, match=r"at most 3, the number of images with label 1 .* got 4") as caught:
        idx(tmp_path, "train", samples_per_class=4)
    assert caught.value.argument == "samples_per_class"


def message_of_idx(folder: Path, classes: list[str] | None = None) -> str:
    with pytest.raises(DataError) as caught:
        idx(folder, "train", classes)
    return str(caught.value)


def test_idx_that_is_not_there(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert message_of_idx(absent).startswith(f"{absent}: no such folder; expected one with IDX files")
    write_split(tmp_path, "t10k")
    assert message_of_idx(tmp_path) == (
        f"{tmp_path}: the train split is not there; expected train-images-idx3-ubyte or train-images-idx3-ubyte.gz"
    )


def test_idx_with_another_number_of_labels(tmp_path: Path) -> None:
    write_split(tmp_path)
    labels = write(tmp_path, "train-labels-idx1-ubyte", packed(LABELS[:2]))
    message = message_of_idx(tmp_path)
    assert f"{tmp_path / 'train-images-idx3-ubyte'} holds 3 images but {labels} holds 2 labels" in message


def test_idx_with_labels_beyond_its_classes(tmp_path: Path) -> None:
    write_split(tmp_path)
    message = message_of_idx(tmp_path, ["a", "b", "c"])
    assert message.startswith(f"{tmp_path / 'train-labels-idx1-ubyte'}: the largest label is 9")
    assert "there are 3 classes" in message


def test_idx_without_images(tmp_path: Path) -> None:
    write(tmp_path, "train-images-idx3-ubyte", packed(IMAGES[:0]))
    write(tmp_path, "train-labels-idx1-ubyte", packed(LABELS[:0]))
    assert "holds no images (its header says 0 × 2 × 4)" in message_of_idx(tmp_path)


HUGE = bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**32 - 1, 2**16, 2**16)


@pytest.mark.parametrize("extension", ["", ".gz"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (packed(LABELS), "starts with 00 00 08 01, expected 00 00 08 03"),
        (b"\0\0\x0d\3" + packed(IMAGES)[4:], "starts with 00 00 0d 03, expected 00 00 08 03"),
        (b"", "starts with nothing, expected 00 00 08 03"),
        (packed(IMAGES)[:9], "the file ends within its header, after 9 bytes"),
        (packed(IMAGES)[:-1], "the header says 3 × 2 × 4 = 24 bytes, but the file holds only 23"),
        (packed(IMAGES) + b"\0", "the header says 3 × 2 × 4 = 24 bytes, but the file holds more"),
        (HUGE, "18446744069414584320 bytes, but the file holds fewer"),
    ],
)
def test_idx_with_a_wrong_header_or_length(tmp_path: Path, data: bytes, expected: str, extension: str) -> None:
    write_split(tmp_path, extension=extension)
    path = write(tmp_path, f"train-images-idx3-ubyte{extension}", data)
    message = message_of_idx(tmp_path)
    assert message.startswith(f"{path}: ")
    assert expected in message


def test_idx_that_unpacks_to_more_than_it_says(tmp_path: Path) -> None:
    write_split(tmp_path, extension=".gz")
    write(tmp_path, "train-images-idx3-ubyte.gz", packed(IMAGES) + bytes(50_000_000))
    assert "24 bytes, but the file holds more" in message_of_idx(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "not gzip", "flipped"])
def test_idx_with_damaged_gzip(tmp_path: Path, damage: str) -> None:
    write_split(tmp_path, extension=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-6] ^= 0xFF  # in the checksum
    damaged = {"cut": bytes(data[:-12]), "not gzip": packed(IMAGES), "flipped": bytes(data)}
    path.write_bytes(damaged[damage])
    assert message_of_idx(tmp_path).startswith(f"{path}: cannot be read (the file is damaged or truncated")


# --- folders of images --------------------------------------------------------------------------------------


def paint(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def test_image_folder_numbers_classes_and_images_by_name(tmp_path: Path) -> None:
    paint(tmp_path / "train/wasps/b.png", (9, 0, 0))
    paint(tmp_path / "train/ants/z.PNG", (7, 0, 0))
    paint(tmp_path / "train/ants/deeper/a.bmp", (8, 0, 0))
    paint(tmp_path / "train/ants/ä b.png", (6, 0, 0))
    paint(tmp_path / "train/ants/.hidden.png", (1, 0, 0))
    paint(tmp_path / "train/ants/.trash/c.png", (1, 0, 0))
    paint(tmp_path / "train/.cache/c.png", (1, 0, 0))
    paint(tmp_path / "val/bees/b.png", (1, 0, 0))
    (tmp_path / "train/ants/notes.txt").write_text("not an image")
    (tmp_path / "train/README").write_text("not a class")
    dataset = ImageFolder(tmp_path, "train")
    assert dataset.classes == ["ants", "wasps"]
    assert dataset.channels == 3
    assert [dataset.path(index) for index in range(len(dataset))] == [
        tmp_path / "train/ants/deeper/a.bmp",
        tmp_path / "train/ants/z.PNG",
        tmp_path / "train/ants/ä b.png",
        tmp_path / "train/wasps/b.png",
    ]
    samples = [dataset.read(index) for index in range(4)]
    assert [sample["label"] for sample in samples] == [0, 0, 0, 1]
    assert [sample["image"][0, 0, 0] for sample in samples] == [8, 7, 6, 9]
    assert {sample["image"].shape for sample in samples} == {(4, 6, 3)}
    assert type(samples[0]["label"]) is int


def test_image_folder_without_a_split(tmp_path: Path) -> None:
    paint(tmp_path / "a/1.png", (1, 0, 0))
    paint(tmp_path / "b/1.jpg", (2, 0, 0))
    assert len(ImageFolder(tmp_path)) == 2
    with pytest.raises(DataError, match=r"b: no images in this class folder; expected files with .* \.png$"):
        ImageFolder(tmp_path, extensions=[".PNG"])


def test_image_folder_survives_the_way_to_a_worker(tmp_path: Path) -> None:
    for index in range(300):
        (tmp_path / f"class {index % 3}").mkdir(exist_ok=True)
        (tmp_path / f"class {index % 3}" / f"{index}.jpg").touch()
    dataset = ImageFolder(tmp_path)
    copied = pickle.loads(pickle.dumps(dataset))
    assert [copied.path(index) for index in range(300)] == sorted(tmp_path.rglob("*.jpg"))
    assert len(pickle.dumps(dataset)) < 300 * 40


def test_image_folder_that_is_not_as_expected(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(DataError) as caught:
        ImageFolder(absent, "train")
    assert str(caught.value) == (
        f"{absent}: no such folder; expected {absent}/train/<class>/<image.jpg>, a folder per class"
    )
    with pytest.raises(DataError, match=r"no class folders in it; expected .*/<class>/<image\.jpg>"):
        ImageFolder(tmp_path)
    with pytest.raises(DataError, match=r"train: no such folder; .* has no folders"):
        ImageFolder(tmp_path, "train")
    paint(tmp_path / "training/a/1.png", (1, 0, 0))
    with pytest.raises(DataError, match=r"train: no such folder; .* has training"):
        ImageFolder(tmp_path, "train")
    (tmp_path / "training/empty").mkdir()
    with pytest.raises(DataError) as caught:
        ImageFolder(tmp_path, "training")
    assert str(caught.value).startswith(f"{tmp_path / 'training' / 'empty'}: no images in this class folder")


def test_image_folder_whose_split_was_forgotten(tmp_path: Path) -> None:
    paint(tmp_path / "train/a/1.png", (1, 0, 0))
    paint(tmp_path / "val/a/1.png", (1, 0, 0))
    with pytest.raises(DataError, match="has the splits train, val, not classes; add `split: train`"):
        ImageFolder(tmp_path)
    paint(tmp_path / "bus/1.png", (1, 0, 0))
    assert ImageFolder(tmp_path).classes == ["bus", "train", "val"]


def test_image_folder_names_the_file_that_is_broken(tmp_path: Path) -> None:
    paint(tmp_path / "a/1.png", (1, 0, 0))
    (tmp_path / "a/2.png").touch()
    dataset = ImageFolder(tmp_path)
    assert dataset.read(0)["label"] == 0
    with pytest.raises(DataError, match=r"a/2\.png: the file is empty"):
        dataset.read(1)


def test_image_folder_follows_links_within_its_root_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    paint(root / "train/a/1.png", (1, 0, 0))
    paint(root / "pool/2.png", (2, 0, 0))
    paint(tmp_path / "elsewhere/deep/3.png", (3, 0, 0))
    (root / "train/a/2.png").symlink_to(root / "pool/2.png")
    (root / "train/b").symlink_to("../pool")
    dataset = ImageFolder(root, "train")
    assert [dataset.read(index)["image"][0, 0, 0] for index in range(3)] == [1, 2, 2]
    outside = {
        "train/a/3.png": tmp_path / "elsewhere/deep/3.png",
        "train/c": tmp_path / "elsewhere",
        "train/a/deeper": Path("../../../elsewhere"),
    }
    for name, target in outside.items():
        (root / name).symlink_to(target)
        with pytest.raises(DataError, match=rf"{name}: leads out of {root}, to {tmp_path}/elsewhere.*follow_links"):
            ImageFolder(root, "train")
        assert len(ImageFolder(root, "train", follow_links=True)) == 4
        (root / name).unlink()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    for split in ("link", "../elsewhere", str(tmp_path / "elsewhere")):
        with pytest.raises(DataError, match="leads out of"):
            ImageFolder(root, split)
    (tmp_path / "named").symlink_to(root)
    assert len(ImageFolder(tmp_path / "named", "train")) == 3


def test_image_folder_whose_links_go_in_circles(tmp_path: Path) -> None:
    paint(tmp_path / "a/1.png", (1, 0, 0))
    (tmp_path / "a/again").symlink_to(".")
    with pytest.raises(DataError, match="a/again: a link that leads back to a folder it is in"):
        ImageFolder(tmp_path)


# --- what comes with the package ----------------------------------------------------------------------------


def test_fashion_small_is_balanced() -> None:
    for dataset, each in ((fashion_small("train"), 600), (fashion_small("test"), 200)):
        assert dataset.images.shape == (10 * each, 1, 28, 28)
        assert torch.bincount(dataset.fields["label"]).tolist() == [each] * 10
        assert dataset.classes == list(FASHION_CLASSES)
        assert dataset.classes[9] == "Ankle boot"
        assert 0.2 < dataset.images.float().mean() / 255 < 0.4


def test_fashion_small_is_small_and_has_its_licence() -> None:
    import paceline.data

    folder = Path(paceline.data.__file__).parent / "embedded" / "fashion"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_500_000
    assert "Copyright (c) 2017 Zalando SE" in (folder / "LICENSE").read_text()


@pytest.mark.real_data
def test_fashion_small_is_part_of_the_real_one(real_data: Path) -> None:
    full = idx(real_data / "fashion_mnist", "test", FASHION_CLASSES)
    assert full.images.shape == (10_000, 1, 28, 28)
    assert torch.bincount(full.fields["label"]).tolist() == [1_000] * 10
    small = fashion_small("test")
    known = {
        (image.tobytes(), label)
        for image, label in zip(full.images.numpy(), full.fields["label"].tolist(), strict=True)
    }
    part = zip(small.images.numpy(), small.fields["label"].tolist(), strict=True)
    assert all((image.tobytes(), label) in known for image, label in part)
    assert torch.equal(small.images[0], full.images[0])


@pytest.mark.real_data
def test_full_fashion_mnist(real_data: Path) -> None:
    full = idx(real_data / "fashion_mnist", "train")
    assert full.images.shape == (60_000, 1, 28, 28)
    assert torch.bincount(full.fields["label"]).tolist() == [6_000] * 10
    # The mean that is usually given for this data set.
    assert int(full.images.sum()) / full.images.numel() / 255 == pytest.approx(0.2860, abs=1e-4)


@pytest.mark.real_data
def test_ants_and_bees(real_data: Path) -> None:
    train, val = (ImageFolder(real_data / "hymenoptera_256", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (244, 153)
    assert train.classes == val.classes == ["ants", "bees"]
    assert val.read(69)["label"] == 0
    assert val.read(70)["label"] == 1
    image = train.read(0)["image"]
    assert image.dtype == np.uint8
    assert min(image.shape[:2]) == 256
